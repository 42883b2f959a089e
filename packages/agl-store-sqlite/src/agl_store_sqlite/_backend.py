"""Transactions on a SQLite file: one thread writes, a few read, and one watches the file while a call waits.

Queued writes share one transaction, and are answered after its commit. Reads run on separate connections. A change
by another process, or by another store object, is noticed within ``poll_s`` seconds while a call waits.
"""

import asyncio
import logging
import math
import sqlite3
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agl.errors import StoreError
from agl.stores import Reads, Tables, WakeUp, Work, expire
from agl_store_sqlite._acknowledged import AcknowledgedCursor, last_cursor
from agl_store_sqlite._reads import SQLiteReads
from agl_store_sqlite._schema import begin, connect, explain, is_locked, open_file
from agl_store_sqlite._tables import SQLiteTables, next_deadline
from agl_store_sqlite.sql.batches import Batches, Look, OverdueError, answer_to, perform
from agl_store_sqlite.sql.compaction import Compaction
from agl_store_sqlite.sql.packing import Packer

READERS = 4

GATHER_S = 0.0005
"""Seconds for which writes gather if several were committed together before: a commit takes longer, and most of the
processor time of a small write.
"""

SWITCH_S = 0.0005
"""Seconds after which a busy thread of this process lets another one run; Python's default is ten times as long.

A thread in a transaction, for whose end other processes wait, has to get the interpreter back after every statement.
"""

_PAGES = ("page_count", "freelist_count", "page_size")
LEAST_FREE_BYTES, LEAST_FREE_SHARE = 1 << 20, 0.1
"""Least unused space, in bytes and as a share of the file, for which the file is rewritten."""

T = TypeVar("T")


def _nothing(_: Tables) -> None:
    """Do nothing."""


_LOOK = Work(act=_nothing)
"""A look at the file: decides overdue attempts.

The answer is the file's data version, which changes when another connection writes, and the next deadline.
"""

_logger = logging.getLogger(__name__)


class SQLiteBackend:
    """Implements :class:`agl.stores.Backend` on a SQLite file.

    Args:
        path: The file; created, or migrated to the current layout.
        clock: Unix seconds; leases and time limits follow it.
        poll_s: Seconds within which changes by other processes are noticed.
        busy_s: Seconds to wait for another process's transaction.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float], poll_s: float, busy_s: float) -> None:
        self.shown_url = f"sqlite:///{path}"
        self._path, self._clock, self._poll_s, self._busy_s = path, clock, poll_s, busy_s
        self._acknowledged = AcknowledgedCursor(path)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._db = open_file(path, busy_s=busy_s)
        self._acknowledged.compare(self._db)
        self._packer = Packer()
        self._data_version = 0
        self._written_at = math.inf  # the clock may have been set back since the file was written
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        explained = partial(explain, path=path)
        self._writer = Batches(
            self._write, shown_url=self.shown_url, explain=explained, is_shared=is_locked, gather_s=GATHER_S
        )
        self._reader = Batches(
            self._read, shown_url=self.shown_url, explain=explained, is_shared=is_locked, threads=READERS
        )
        self.queued, self.changed = WakeUp(on_wait=self._on_wait), WakeUp(on_wait=self._on_wait)
        self._awaited, self._is_closed = threading.Event(), threading.Event()
        self._watch = threading.Thread(target=self._watch_file, name=f"agl-watch {path.name}", daemon=True)
        self._watch.start()

    async def write(self, work: Work[T]) -> T:
        return await self._writer.run(work, undo=work.undo)

    async def read(self, look: Callable[[Reads], T]) -> T:
        while True:
            try:
                return await self._reader.run(look)
            except OverdueError:
                await self._writer.run(_LOOK)

    async def compact(self) -> Compaction:
        """See :class:`agl_store_sqlite.sql.compaction.Compactable`."""
        return await self._maintain(self._compact, LEAST_FREE_BYTES, LEAST_FREE_SHARE)

    async def vacuum(self) -> Compaction:
        """See :class:`agl_store_sqlite.sql.compaction.Measured`."""
        return await self._maintain(self._compact, 0, 0.0)

    async def size(self) -> int:
        """See :class:`agl_store_sqlite.sql.compaction.Measured`."""
        return await self._maintain(self._used)

    async def _maintain(self, work: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.to_thread(work, *args)
        except sqlite3.Error as error:
            raise explain(error, self._path) from error

    def _compact(self, least_bytes: int, least_share: float) -> Compaction:
        before = self._size()
        with closing(connect(self._path, busy_s=self._busy_s)) as db:
            _, free, page = _pages(db)
            if free and free * page >= max(least_bytes, before * least_share):
                db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return Compaction(before=before, after=self._size())

    def _used(self) -> int:
        with closing(connect(self._path, busy_s=self._busy_s)) as db:
            every, free, page = _pages(db)
            return (every - free) * page

    def _size(self) -> int:
        files = (self._path, self._path.with_name(f"{self._path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._is_closed.set()
        self._awaited.set()
        self._watch.join()
        self._writer.close()
        self._reader.close()
        for connection in (self._db, *self._connections):
            connection.close()
        self._acknowledged.close()
        self.queued.ring()
        self.changed.ring()

    def _write(self, works: Sequence[Work[Any]]) -> Sequence[Any]:
        now = self._clock()
        if now < self._written_at:
            with self._transaction() as tables:
                tables.bound_leases()
        self._written_at = now
        if next_deadline(self._db) <= now:
            with self._transaction() as tables:
                expire(tables)
        real = [work for work in works if work is not _LOOK]
        answers = iter(self._transact(real) if real else ())
        return [self._seen() if work is _LOOK else next(answers) for work in works]

    def _seen(self) -> tuple[int, float]:
        return self._db.execute("PRAGMA data_version").fetchone()[0], next_deadline(self._db)

    def _transact(self, works: Sequence[Work[Any]]) -> Sequence[Any]:
        with self._transaction() as tables:
            return perform(works, tables)

    @contextmanager
    def _transaction(self) -> Generator[SQLiteTables]:
        """Open tables in a transaction, commit it at the end, and wake the waiters for its changes."""
        self._acknowledged.require_store()
        tables = SQLiteTables(self._db, self._packer, now=self._clock())
        begin(self._db, busy_s=self._busy_s)
        try:
            yield tables
            tables.write_statistics()
            cursor = last_cursor(self._db) if tables.has_changed else None
            self._db.execute("COMMIT")
        except BaseException:
            self._packer.clear()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if cursor is not None:
            self._acknowledged.note(cursor)
        if tables.has_queued:
            self.queued.ring()
        if tables.has_changed:
            self.changed.ring()

    def _read(self, looks: Sequence[Look]) -> Sequence[Any]:
        db = self._reading_connection()
        db.execute("BEGIN")
        try:
            if next_deadline(db) <= self._clock():
                return [OverdueError()] * len(looks)
            return [answer_to(look, SQLiteReads(db)) for look in looks]
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _reading_connection(self) -> sqlite3.Connection:
        """Return this thread's own connection, opened on first use."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect(self._path, busy_s=self._busy_s, is_reader=True)
            self._connections.append(connection)
        return connection

    def _on_wait(self) -> float:
        self._awaited.set()
        return math.inf

    def _watch_file(self) -> None:
        """Look for changes by other processes while a call waits; runs in a separate thread."""
        while not self._is_closed.is_set():
            self._awaited.wait()
            self._awaited.clear()
            while (self.queued.is_awaited or self.changed.is_awaited) and not self._is_closed.is_set():
                self._is_closed.wait(self._look())

    def _look(self) -> float:
        """Decide overdue attempts, and wake all waiters if others wrote; return the seconds until the next look."""
        try:
            looked = self._writer.submit(_LOOK)
        except (RuntimeError, StoreError):  # the interpreter ends, or the store was closed
            return self._poll_s
        try:
            version, deadline = looked.result()
        except Exception:
            if not self._is_closed.is_set() and threading.main_thread().is_alive():  # otherwise the process is ending
                _logger.warning("the store %s could not be read; the read is repeated", self._path, exc_info=True)
            return self._poll_s
        if version != self._data_version:
            self._data_version = version
            self.queued.ring()
            self.changed.ring()
        return max(0.0, min(self._poll_s, deadline - self._clock()))


def _pages(db: sqlite3.Connection) -> tuple[int, int, int]:
    """Return the number of pages, the number of unused pages, and the size of a page in bytes."""
    every, free, page = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _PAGES)
    return every, free, page
