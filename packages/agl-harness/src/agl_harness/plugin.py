"""Registers ``agl harness``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl harness``."""
    yield CommandEntry(
        name="harness", factory="agl_harness.command:harness", summary="list, install, check and run coding harnesses"
    )
