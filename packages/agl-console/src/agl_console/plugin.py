"""Registers ``agl console``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl console``."""
    yield CommandEntry(name="console", factory="agl_console.command:console", summary="look at runs in a browser")
