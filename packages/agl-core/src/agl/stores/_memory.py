"""``memory://``: the store for tests, notebooks and dry runs; everything is gone when the process ends.

It follows the same rules as the durable stores and deflates what it can, so that a call of 1,200 tokens takes less
than 8 KB. The durable stores keep a conversation's common prefix once; this one keeps every prompt whole, so long
conversations belong in a file. One lock guards plain tables; no operation holds it while it waits.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from agl.errors import StoreError
from agl.stores._memory_tables import MemoryTables
from agl.stores._operations import closed, expire
from agl.stores._store import TableStore
from agl.stores._tables import Work
from agl.stores._wake_up import WakeUp

T = TypeVar("T")


class _Memory:
    """The backend; see :class:`agl.stores.Backend`."""

    shown_url = "memory://"

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.queued, self.changed = WakeUp(on_wait=self._pause_s), WakeUp(on_wait=self._pause_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._tables = MemoryTables()
        self._is_closed = False

    async def write(self, work: Work[T]) -> T:
        return self._transact(work.do)

    async def read(self, look: Callable[[MemoryTables], T]) -> T:
        return self._transact(look)

    async def close(self) -> None:
        self._is_closed = True
        self.queued.ring()
        self.changed.ring()

    def _transact(self, act: Callable[[MemoryTables], T]) -> T:
        """Decide overdue attempts, run ``act`` and ring for the changes of both; returns the result of ``act``."""
        with self._lock:
            if self._is_closed:
                raise closed(self.shown_url)
            tables = self._tables
            cursor, tables.now, tables.has_queued = tables.cursor(), self._clock(), False
            try:
                expire(tables)
                return act(tables)
            finally:
                if tables.has_queued:
                    self.queued.ring()
                if tables.cursor() != cursor:
                    self.changed.ring()

    def _pause_s(self) -> float:
        with self._lock:
            return self._tables.next_deadline() - self._clock()


class MemoryStore(TableStore):
    """A :class:`agl.contracts.Store` in this process's memory.

    Args:
        url: ``memory://``; every object is a store of its own.
        clock: Unix seconds; leases and time limits follow it. By default it starts at the system's time and goes on
            evenly, however the system's clock is set.
    """

    def __init__(self, url: str = "memory://", *, clock: Callable[[], float] | None = None) -> None:
        if url.rstrip("/") != "memory:":
            raise StoreError(f"{url!r} is no URL of a memory store; write memory://, or sqlite:///runs.db for a file")
        offset = time.time() - time.monotonic()
        super().__init__(_Memory(clock=clock or (lambda: time.monotonic() + offset)))
