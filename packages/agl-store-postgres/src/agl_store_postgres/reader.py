"""Answers reads: those that wait together share one transaction, on a snapshot."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from agl_store_postgres._reads import PostgresReads
from agl_store_postgres.connections import Connection, access_of
from agl_store_postgres.loading import NOW
from agl_store_postgres.urls import DatabaseTarget
from agl_store_sqlite.sql.batches import Look, OverdueError, answer_to
from agl_store_sqlite.sql.servers import BatchReader, ThreadConnection, UncheckedRead

_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_IS_OVERDUE = b"SELECT (SELECT min(deadline) FROM attempts WHERE status = 'running') <= " + NOW


def reader_of(
    target: DatabaseTarget, *, stopping: threading.Event, reads: Callable[[Connection], PostgresReads] = PostgresReads
) -> BatchReader[Connection]:
    """Make a reader of a database; for each transaction, ``reads`` makes the object that answers the reads."""

    def read_all(db: Connection, looks: Sequence[Look]) -> list[Any]:
        with db.pipeline():  # the transaction begins with the first query that waits for rows
            db.execute(_BEGIN)
            cursor = db.execute(_IS_OVERDUE)
            answers = [answer_to(look, reads(db)) for look in looks]
            is_overdue = cursor.fetchone() == (True,)
            db.execute(b"COMMIT")
        return [
            OverdueError() if is_overdue and not isinstance(look, UncheckedRead) else answer
            for look, answer in zip(looks, answers, strict=True)
        ]

    access = access_of(target)
    return BatchReader(access, connection=lambda: ThreadConnection(access, stopping=stopping), read_all=read_all)
