"""Registers ``agl import``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl import``."""
    yield CommandEntry(
        name="import", factory="agl_import.command:import_runs", summary="import runs that other tools recorded"
    )
