"""The kit for command lines: the ``agl`` command, options for stores and rollouts, output."""

from agl_inspect.terminal.program import main

__all__ = ["main"]
