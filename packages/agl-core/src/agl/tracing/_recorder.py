"""Collects an attempt's spans in the agent's process until its runner takes them.

The agent's threads only append; the runner drains in batches while the attempt runs and once more at its end.
"""

from threading import Lock

from agl.schemas import Span


class SpanRecorder:
    """A thread-safe buffer of finished spans, in the order in which they finished; it grows until it is drained."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[Span] = []

    def __len__(self) -> int:
        """The number of waiting spans."""
        return len(self._spans)

    def record(self, span: Span) -> None:
        """Add a finished span; never raises."""
        with self._lock:
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """Remove and return all waiting spans, oldest first."""
        with self._lock:
            taken, self._spans = self._spans, []
        return taken
