"""Shows the progress of an experiment: a summary in a terminal, plain lines elsewhere, nothing when quiet."""

import os
import sys
import time
from typing import Protocol

_EVERY_S = 5.0
"""Seconds between two lines about one operation."""


class Progress(Protocol):
    """The contract of a progress display; every method returns at once."""

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Show that the operation ``name`` is at ``done`` of ``total``; remove it if ``total`` is 0."""
        ...

    def close(self) -> None:
        """Restore the terminal; idempotent."""
        ...


class Quiet:
    """A progress display that shows nothing."""

    def say(self, text: str) -> None:
        """Ignore the line."""

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Ignore the progress."""

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """A progress display that prints plain lines.

    Every message is printed, and the progress of each operation at most every five seconds.

    Args:
        on_errors: Print to standard error instead of standard output.
    """

    def __init__(self, *, on_errors: bool = False) -> None:
        self._on_errors = on_errors
        self._last: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print the line."""
        print(text, flush=True, file=sys.stderr if self._on_errors else None)

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Print the operation's progress if five seconds have passed since its last line."""
        now = time.monotonic()
        if total == 0:
            self._last.pop(name, None)
        # The first update starts the clock and prints nothing, so quick tasks stay silent.
        elif now - self._last.setdefault(name, now) >= _EVERY_S:
            self._last[name] = now
            self.say(f"{name}: {done}/{total} {text}".rstrip())

    def close(self) -> None:
        """Do nothing."""


def default_progress(*, on_errors: bool = False) -> Progress:
    """Return a ``LiveSummary`` if all output goes to a terminal that can draw, else :class:`Lines`.

    Args:
        on_errors: Whether :class:`Lines` prints to standard error.
    """
    # Both: what goes to a file or a pipe must stay free of control sequences.
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    can_draw = is_terminal and os.environ.get("TERM") not in ("dumb", "unknown")
    if not can_draw:
        return Lines(on_errors=on_errors)
    from agl_run.display.summary import LiveSummary  # here, because what prints lines draws nothing

    return LiveSummary()
