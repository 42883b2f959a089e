"""Errors of this package, below those of agl."""

from __future__ import annotations

from agl.errors import RunError


class RowTooLongError(RunError):
    """A row is longer than the configured lengths, and the configuration says to stop then."""
