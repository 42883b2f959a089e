"""Runs writes: those that wait together share one transaction, which is repeated after lost connections and collisions.

If a connection breaks, its transaction is repeated on a new one, for a limited time. If the commit had been sent, the
writer asks the server whether the transaction was committed. A transaction without an id on the server wrote nothing,
so it is safe to repeat. An id alone proves nothing: after a crash, the server reuses the ids of transactions that it
rolled back. So every transaction with an id also writes a mark, by which its writer recognises it.
"""

import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from agl.stores import Work, expire
from agl_store_postgres.connections import Connection, access_of, rolled_back
from agl_store_postgres.faults import is_collision, is_lost
from agl_store_postgres.loading import Begun, begin, begin_lapsed
from agl_store_postgres.partitions import Partitions
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writing import commit
from agl_store_sqlite.sql.batches import perform
from agl_store_sqlite.sql.changes import Changes
from agl_store_sqlite.sql.loaded_tables import LoadedTables
from agl_store_sqlite.sql.needs import Needs, needs_of
from agl_store_sqlite.sql.packing import Packer
from agl_store_sqlite.sql.servers import RESTART_WAIT_S, ThreadConnection

MAX_COLLISIONS = 5
"""Largest number of repetitions after collisions with other transactions."""

_PAUSE_S = 0.05

_MARKS = b"\x00writer "
"""Prefix of the keys of documents that hold the mark of a writer's last transaction; the writer's id follows."""

_REMOVE_MARKS = b"DELETE FROM documents WHERE key = %b OR (key >= %b AND key < %b AND value < %b)"

_KEPT_NS = 24 * 3600 * 10**9
"""Nanoseconds after which the marks of killed writers are removed."""


@dataclass(frozen=True, kw_only=True)
class _Doubt:
    """A transaction whose commit was sent: the id on the server, the mark that it writes, and the answers."""

    xid: str
    mark: bytes
    answers: Sequence[Any]


class BatchWriter:
    """Runs batches of work on one connection; used by one thread.

    Args:
        on_change: Called after a commit about which waiting callers must be informed.
        is_partitioned: Whether the table of spans has partitions.
    """

    def __init__(
        self,
        target: DatabaseTarget,
        *,
        connection: Connection | None,
        feed: int,
        stopping: threading.Event,
        on_change: Callable[[], object],
        is_partitioned: bool = False,
    ) -> None:
        self._feed = feed
        self._partitions = Partitions() if is_partitioned else None
        self._on_change = on_change
        self._connection = ThreadConnection(access_of(target), stopping=stopping, current=connection)
        self._packer = Packer()
        self._in_doubt: _Doubt | None = None
        self._key = _MARKS + uuid.uuid4().bytes
        self._marked = 0

    def close(self) -> None:
        """Remove this writer's mark and the marks of killed writers, and close the connection."""
        db = self._connection.current
        if db is not None and self._marked:
            with suppress(psycopg.Error):  # the next writer that closes removes it
                old = struct.pack(">Q", time.time_ns() - _KEPT_NS)
                db.execute(_REMOVE_MARKS, (self._key, _MARKS, _MARKS + b"\xff" * 17, old))
        self._connection.drop()

    def __call__(self, works: Sequence[Work[Any]]) -> Sequence[Any]:
        """Run a batch; returns the answers after the commit. Raises psycopg's errors, or StoreError if unreachable."""
        end = time.monotonic() + RESTART_WAIT_S
        collisions = 0
        while True:
            self._in_doubt = None
            db = self._connection.open()
            try:
                return self._attempt(db, works)
            except BaseException as error:
                self._packer.clear()
                self._forget()
                if is_lost(error, db) or not rolled_back(db):
                    self._connection.drop()
                    if time.monotonic() > end:
                        raise
                    if self._in_doubt is not None and self._was_committed(self._in_doubt, end=end):
                        return self._in_doubt.answers
                    continue
                collisions += 1
                if not isinstance(error, psycopg.Error) or not is_collision(error) or collisions > MAX_COLLISIONS:
                    raise

    def _attempt(self, db: Connection, works: Sequence[Work[Any]]) -> Sequence[Any]:
        needs = [needs_of(work) for work in works]
        begun = self._begin(db, needs)
        if begun.rows.next_deadline <= begun.rows.now:
            db.rollback()
            self._expire(db)
            begun = self._begin(db, needs)
        tables = LoadedTables(begun.rows, self._packer)
        answers = perform(works, tables)
        tables.changes.has_queued |= tables.has_spare
        self._before_commit(db, begun, tables.changes)
        if begun.xid is not None:
            mark = tables.changes.documents[self._key] = self._next_mark()
            self._in_doubt = _Doubt(xid=begun.xid, mark=mark, answers=answers)
        self._commit(db, tables.changes)
        if tables.changes.is_heard:
            self._on_change()
        return answers

    def _begin(self, db: Connection, needs: Sequence[Needs]) -> Begun:
        return begin(db, needs, partitions=self._partitions)

    def _forget(self) -> None:
        """Forget which partitions exist on the server."""
        if self._partitions is not None:
            self._partitions.forget()

    def _before_commit(self, db: Connection, begun: Begun, changes: Changes) -> None:
        """Write spans to other servers; does nothing in a store without shards."""

    def _commit(self, db: Connection, changes: Changes) -> None:
        commit(db, changes, feed=self._feed, partitions=self._partitions)

    def _expire(self, db: Connection) -> None:
        """Decide overdue attempts, except those that another machine is deciding."""
        loaded, lapsed = begin_lapsed(db)
        tables = LoadedTables(loaded, self._packer, lapsed=lapsed)
        expire(tables)
        self._commit(db, tables.changes)

    def _next_mark(self) -> bytes:
        """Return a mark that no other transaction of this writer writes; it starts with the time."""
        self._marked += 1
        return struct.pack(">QQ", time.time_ns(), self._marked)

    def _was_committed(self, doubt: _Doubt, *, end: float) -> bool:
        """Ask the server whether a transaction was committed; repeats the question while it is in progress."""
        while True:
            db = self._connection.open()
            try:
                ((status,),) = db.execute("SELECT pg_xact_status(%s::xid8)", (doubt.xid,)).fetchall()
                if status != "in progress":
                    found = db.execute("SELECT value FROM documents WHERE key = %b", (self._key,)).fetchone()
                    return status == "committed" and found == (doubt.mark,)
            except psycopg.Error as error:
                if not is_lost(error, db):
                    return False  # the server does not know the id, for example a replica that took over
                self._connection.drop()
                if time.monotonic() > end:
                    raise
                continue
            time.sleep(_PAUSE_S)
