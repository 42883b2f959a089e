"""Runs reads: those that wait together share one transaction, on a snapshot, in one of a few threads."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from agl.stores import Reads
from agl_store_postgres._reads import PostgresReads
from agl_store_postgres.connections import RESTART_WAIT_S, Connection, ThreadConnection, rolled_back
from agl_store_postgres.faults import is_lost
from agl_store_postgres.loading import NOW
from agl_store_postgres.urls import DatabaseTarget
from agl_store_sqlite.sql import Look, OverdueError, answer_to

_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_IS_OVERDUE = b"SELECT (SELECT min(deadline) FROM attempts WHERE status = 'running') <= " + NOW


class UncheckedRead:
    """A read that is answered even while attempts are overdue."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __call__(self, reads: Reads) -> Any:
        """Return the answer of the read."""
        return self._look(reads)


class BatchReader:
    """Runs batches of reads, on one connection of its own per calling thread.

    Args:
        reads: Makes the tables that reads look into, for one transaction.
    """

    def __init__(
        self,
        target: DatabaseTarget,
        *,
        stopping: threading.Event,
        reads: Callable[[Connection], PostgresReads] = PostgresReads,
    ) -> None:
        self._reads = reads
        self._target = target
        self._stopping = stopping
        self._local = threading.local()
        self._connections: list[ThreadConnection] = []

    def close(self) -> None:
        """Close the connections."""
        while self._connections:
            self._connections.pop().drop()

    def __call__(self, looks: Sequence[Look]) -> Sequence[Any]:
        """Return the answers; :class:`OverdueError` for reads that have to wait for the writer."""
        connection = self._connection()
        end = time.monotonic() + RESTART_WAIT_S
        while True:
            db = connection.open()
            try:
                return self._read_all(db, looks)
            except BaseException as error:
                if is_lost(error, db):
                    connection.drop()
                    if time.monotonic() > end:
                        raise
                    continue
                if not rolled_back(db):
                    connection.drop()
                raise

    def _connection(self) -> ThreadConnection:
        connection: ThreadConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = ThreadConnection(self._target, stopping=self._stopping)
            self._connections.append(connection)
        return connection

    def _read_all(self, db: Connection, looks: Sequence[Look]) -> list[Any]:
        """Return all answers from one transaction, which begins with the first query that waits for rows."""
        with db.pipeline():
            db.execute(_BEGIN)
            cursor = db.execute(_IS_OVERDUE)
            answers = [answer_to(look, self._reads(db)) for look in looks]
            is_overdue = cursor.fetchone() == (True,)
            db.execute(b"COMMIT")
        if not is_overdue:
            return answers
        return [
            answer if isinstance(look, UncheckedRead) else OverdueError()
            for look, answer in zip(looks, answers, strict=True)
        ]
