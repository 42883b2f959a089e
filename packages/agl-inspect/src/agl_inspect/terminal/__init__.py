"""Tools for command lines: the ``agl`` command, options that select stores and rollouts, and output."""

from agl_inspect.terminal.program import main

__all__ = ["main"]
