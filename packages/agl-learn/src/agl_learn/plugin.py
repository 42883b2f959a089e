"""Registers the command of learning while serving."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl learn``."""
    yield CommandEntry(
        name="learn",
        factory="agl_learn.cli:learn",
        summary="learn from served conversations, and promote what is better",
    )
