"""Runs writes: those that wait together share one transaction, which is repeated after lost connections and collisions.

A transaction whose connection broke is repeated on a new one, for a limited time. If the commit was under way, the
writer asks the server whether it took place. A transaction without an id on the server wrote nothing, so it is safe to
repeat.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from agl.stores import Work, expire
from agl_run.sql import Packer, perform
from agl_store_postgres._tables import PostgresTables
from agl_store_postgres.connections import RESTART_WAIT_S, Connection, ThreadConnection
from agl_store_postgres.faults import is_collision, is_lost
from agl_store_postgres.loading import begin, begin_lapsed
from agl_store_postgres.needs import needs_of
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writing import commit

MAX_COLLISIONS = 5
"""Largest number of repetitions after collisions with other transactions."""

_PAUSE_S = 0.05


class BatchWriter:
    """Runs batches of work on one connection; used by one thread."""

    def __init__(self, target: DatabaseTarget, *, connection: Connection, feed: int, stopping: threading.Event) -> None:
        self._feed = feed
        self._connection = ThreadConnection(target, stopping=stopping, connection=connection)
        self._packer = Packer()
        self._in_doubt: tuple[str, Sequence[Any]] | None = None

    def close(self) -> None:
        """Close the connection."""
        self._connection.drop()

    def __call__(self, works: Sequence[Work[Any]]) -> Sequence[Any]:
        """Return the answers after the commit; raises psycopg's errors, or that the server cannot be reached."""
        end = time.monotonic() + RESTART_WAIT_S
        collisions = 0
        while True:
            self._in_doubt = None
            db = self._connection.open()
            try:
                return self._attempt(db, works)
            except BaseException as error:
                self._packer.clear()
                if is_lost(error, db) or not _rolled_back(db):
                    self._connection.drop()
                    if time.monotonic() > end:
                        raise
                    if self._in_doubt is not None and self._was_committed(self._in_doubt[0], end=end):
                        return self._in_doubt[1]
                    continue
                collisions += 1
                if not isinstance(error, psycopg.Error) or not is_collision(error) or collisions > MAX_COLLISIONS:
                    raise

    def _attempt(self, db: Connection, works: Sequence[Work[Any]]) -> Sequence[Any]:
        needs = [needs_of(work) for work in works]
        loaded = begin(db, needs)
        if loaded.next_deadline <= loaded.now:
            db.rollback()
            self._expire(db)
            loaded = begin(db, needs)
        tables = PostgresTables(loaded, self._packer)
        answers = perform(works, tables)
        tables.changes.has_queued |= tables.has_spare
        self._in_doubt = None if loaded.xid is None else (loaded.xid, answers)
        commit(db, tables.changes, feed=self._feed)
        return answers

    def _expire(self, db: Connection) -> None:
        """Decide overdue attempts, except those that another machine is deciding."""
        loaded, lapsed = begin_lapsed(db)
        tables = PostgresTables(loaded, self._packer, lapsed=lapsed)
        expire(tables)
        commit(db, tables.changes, feed=self._feed)

    def _was_committed(self, xid: str, *, end: float) -> bool:
        """Ask the server whether the transaction took place, until it knows."""
        while True:
            db = self._connection.open()
            try:
                ((status,),) = db.execute("SELECT pg_xact_status(%s::xid8)", (xid,)).fetchall()
            except psycopg.Error as error:
                if not is_lost(error, db):
                    return False  # the server does not know it, such as a replica that took over
                self._connection.drop()
                if time.monotonic() > end:
                    raise
                continue
            if status != "in progress":
                return status == "committed"
            time.sleep(_PAUSE_S)


def _rolled_back(db: Connection) -> bool:
    """Roll back, which also drops psycopg's failed prepared statements; returns false if the connection is gone."""
    try:
        db.rollback()
    except psycopg.Error:
        return False
    return True
