"""Shows the progress of an experiment: bars or a summary in a terminal, plain lines elsewhere, nothing when quiet."""

import os
import sys
import time
from typing import Any, Protocol

from agl_run.display.summary import LiveSummary


class Progress(Protocol):
    """Shows the progress of a run; every method returns at once."""

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Show that task ``name`` is at ``done`` of ``total``; a ``total`` of 0 removes the task."""
        ...

    def close(self) -> None:
        """Restore the terminal; idempotent."""
        ...


class Quiet:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Ignore."""

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Ignore."""

    def close(self) -> None:
        """Nothing to do."""


class Lines:
    """Prints plain lines: every message, and each task's state at most every ``every_s`` seconds.

    Args:
        every_s: Seconds between two lines on one task.
        on_errors: Print to standard error.
    """

    def __init__(self, *, every_s: float = 5.0, on_errors: bool = False) -> None:
        self._every_s = every_s
        self._on_errors = on_errors
        self._last: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print it."""
        print(text, flush=True, file=sys.stderr if self._on_errors else None)

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Print the task's state if ``every_s`` seconds have passed since the last time."""
        now = time.monotonic()
        if total == 0:
            self._last.pop(name, None)
        # The first update starts the clock and prints nothing, so quick tasks stay silent.
        elif now - self._last.setdefault(name, now) >= self._every_s:
            self._last[name] = now
            self.say(f"{name}: {done}/{total} {text}".rstrip())

    def close(self) -> None:
        """Nothing to do."""


class Bars:
    """Draws progress bars; ``on_errors`` draws them on standard error."""

    def __init__(self, *, on_errors: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=on_errors),
        )
        self._tasks: dict[str, Any] = {}
        self._rich.start()

    def say(self, text: str) -> None:
        """Print it above the bars."""
        # Names and errors may hold brackets, which rich would take for markup.
        self._rich.console.print(text, markup=False, highlight=False)

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Draw the task's bar."""
        if total == 0:
            if name in self._tasks:
                self._rich.remove_task(self._tasks.pop(name))
            return
        if name not in self._tasks:
            self._tasks[name] = self._rich.add_task(name, total=total, text=text)
        self._rich.update(self._tasks[name], completed=done, total=total, text=text)

    def close(self) -> None:
        """Remove the bars."""
        self._rich.stop()


def default_progress(*, on_errors: bool = False) -> Progress:
    """Return bars if standard output is a terminal, else lines; with ``on_errors`` the same for standard error."""
    stream = sys.stderr if on_errors else sys.stdout
    return Bars(on_errors=on_errors) if stream.isatty() else Lines(on_errors=on_errors)


def run_progress() -> Progress:
    """Return the summary of a whole run if all output goes to a terminal that can draw, else lines."""
    # Both: what goes to a file or a pipe must stay free of control sequences.
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return LiveSummary() if is_terminal and os.environ.get("TERM") not in ("dumb", "unknown") else Lines()
