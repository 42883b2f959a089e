"""Collects an attempt's spans in the agent's process until its runner takes them.

The agent's threads only append; the runner drains in batches while the attempt runs and once more at its end.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Lock

from agl.schemas import Span

_log = logging.getLogger(__name__)


class SpanRecorder:
    """A thread-safe buffer of finished spans, in the order in which they finished.

    Nothing is dropped: when ``bound`` spans wait, ``spill`` is called with all of them in the thread that recorded
    the last one, and :attr:`spilled` counts them. Without ``spill``, or when it raises, they stay in the buffer,
    which then grows beyond the bound.

    Args:
        bound: The most spans that wait before they are spilled.
        spill: Stores spans and returns; called outside the lock, possibly from several threads at once.
    """

    def __init__(self, *, bound: int = 10_000, spill: Callable[[Sequence[Span]], None] | None = None) -> None:
        self._bound = bound
        self._spill = spill
        self._lock = Lock()
        self._spans: list[Span] = []
        self._spilled = 0

    @property
    def spilled(self) -> int:
        """The number of spans that were spilled because the runner did not drain in time."""
        return self._spilled

    def __len__(self) -> int:
        """The number of waiting spans."""
        return len(self._spans)

    def record(self, span: Span) -> None:
        """Add a finished span; never raises."""
        with self._lock:
            self._spans.append(span)
            is_over = self._spill is not None and len(self._spans) >= self._bound
        if is_over:
            self._make_room()

    def drain(self) -> list[Span]:
        """Remove and return all waiting spans, oldest first."""
        with self._lock:
            taken, self._spans = self._spans, []
        return taken

    def _make_room(self) -> None:
        taken = self.drain()
        if not taken or self._spill is None:
            return
        try:
            self._spill(taken)
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("%d spans could not be spilled to the store; they stay in memory.", len(taken))
            with self._lock:
                self._spans[:0] = taken
        else:
            with self._lock:
                self._spilled += len(taken)
