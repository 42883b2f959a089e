"""Registers ``agl deploy``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl deploy``."""
    yield CommandEntry(
        name="deploy", factory="agl_deploy.command:deploy", summary="write files that deploy an experiment"
    )
