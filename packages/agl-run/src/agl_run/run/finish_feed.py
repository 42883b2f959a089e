"""Wakes waiters for finished rollouts through one shared reader of the store's change feed."""

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from agl.contracts import Store
from agl.schemas import TERMINAL_ROLLOUT, Span

WAIT_S = 20.0
"""Longest single wait for the change feed, in seconds; every change ends the wait early."""

PAUSE_S = 0.02
"""Seconds between two reads of the change feed, so that one read returns the changes of several rollouts."""


class WatchedRollouts:
    """The rollouts of one request, returned in batches as they finish."""

    def __init__(self, rollout_ids: Iterable[str], *, on_change: Callable[[str, str], None]) -> None:
        self._open = set(rollout_ids)
        self._finished: list[str] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._on_change = on_change

    def changed(self, rollout_id: str, status: str) -> None:
        """Record a rollout's new status; after a terminal status, further changes of that rollout are ignored."""
        # The feed may repeat a change, and a rollout that was requested twice ends once.
        if rollout_id not in self._open:
            return
        if status in TERMINAL_ROLLOUT:
            self._open.remove(rollout_id)
            self._finished.append(rollout_id)
            self._news.set()
        self._on_change(rollout_id, status)

    def fail(self, error: Exception) -> None:
        """Make all current and later waits raise ``error``."""
        self._error = error
        self._news.set()

    async def take(self, count: int) -> list[str]:
        """Wait until ``count`` more rollouts or all are finished; return their ids, an empty list at the end."""
        while self._error is None and self._open and len(self._finished) < count:
            # Cleared before the wait and not after it: an end that arrives in between sets it
            # again.
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        taken, self._finished = self._finished, []
        return taken


class FinishFeed:
    """Wakes waiters through one shared reader of the change feed, and caches spans that a worker has just read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._requests: dict[str, WatchedRollouts] = {}
        self._cached: dict[str, tuple[str, list[Span]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> "FinishFeed":
        """Start reading at the end of the feed."""
        # From the end of the log: everything that this session asks for is enqueued later.
        self._reader = asyncio.create_task(self._read(await self._store.cursor()))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    @contextmanager
    def watch(
        self, rollout_ids: Sequence[str], *, on_change: Callable[[str, str], None] = lambda rollout_id, status: None
    ) -> Generator[WatchedRollouts]:
        """Watch rollouts during the block; open the block before the rollouts are enqueued.

        ``on_change`` is called with a rollout's id and new status, with a terminal status only once. If the reader of
        the feed has failed, its error is raised.
        """
        if self._error is not None:
            raise self._error
        request = WatchedRollouts(rollout_ids, on_change=on_change)
        # One table for all requests, so one reader of the change feed serves them all.
        self._requests |= dict.fromkeys(rollout_ids, request)
        try:
            yield request
        finally:
            for rollout_id in rollout_ids:
                self._requests.pop(rollout_id, None)
                self._cached.pop(rollout_id, None)

    def cache(self, rollout_id: str, attempt_id: str, spans: list[Span]) -> None:
        """Cache the spans of an attempt that is ending, if this feed watches the rollout."""
        # Workers also run rollouts that another process waits for; their spans are of no use here.
        if rollout_id in self._requests:
            self._cached[rollout_id] = (attempt_id, spans)

    def take_cached(self, rollout_id: str) -> tuple[str, list[Span]] | None:
        """Remove and return the cached attempt id and spans of a rollout; ``None`` if nothing is cached."""
        return self._cached.pop(rollout_id, None)

    async def _read(self, cursor: int) -> None:
        try:
            while True:
                for change in await self._store.changes(after=cursor, wait_s=WAIT_S):
                    cursor = change.cursor
                    if change.kind == "rollout" and change.key in self._requests:
                        self._requests[change.key].changed(change.key, change.status)
                # The changes of agents that end together come with one request.
                await asyncio.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001  # raised in every present and later wait
            self._error = error
            for request in set(self._requests.values()):
                request.fail(error)
