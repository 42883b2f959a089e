"""Transactions that read: what waits together in one, on a snapshot, in any of a few threads."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psycopg

from agl.errors import AglError
from agl.stores import Reads
from agl_store_postgres._reads import PostgresReads
from agl_store_postgres.faults import is_lost
from agl_store_postgres.links import RESTART_WAIT_S, Connection, Link
from agl_store_postgres.loading import NOW
from agl_store_postgres.urls import Target

Look: TypeAlias = Callable[[Reads], Any]

_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_IS_OVERDUE = b"SELECT (SELECT min(deadline) FROM attempts WHERE status = 'running') <= " + NOW


class OverdueError(Exception):
    """An attempt's deadline has come and is not decided; the read did not take place."""


class Unchecked:
    """A read that takes place whatever is overdue."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __call__(self, reads: Reads) -> Any:
        """The read's answer."""
        return self._look(reads)


class Reader:
    """Does batches of reads on connections of its own, one for each thread that calls it."""

    def __init__(self, target: Target, *, stopping: threading.Event) -> None:
        self._target = target
        self._stopping = stopping
        self._local = threading.local()
        self._links: list[Link] = []

    def close(self) -> None:
        """Close the connections."""
        while self._links:
            self._links.pop().drop()

    def __call__(self, looks: Sequence[Look]) -> Sequence[Any]:
        """The answers, :class:`OverdueError` for reads that have to wait for the writer."""
        link = self._link()
        end = time.monotonic() + RESTART_WAIT_S
        while True:
            db = link.open()
            try:
                return _read_all(db, looks)
            except psycopg.Error as error:
                if not is_lost(error, db):
                    db.rollback()
                    raise
                link.drop()
                if time.monotonic() > end:
                    raise

    def _link(self) -> Link:
        link: Link | None = getattr(self._local, "link", None)
        if link is None:
            link = self._local.link = Link(self._target, stopping=self._stopping)
            self._links.append(link)
        return link


def _read_all(db: Connection, looks: Sequence[Look]) -> list[Any]:
    """All answers. The transaction begins with the first query that waits for rows."""
    with db.pipeline():
        db.execute(_BEGIN)
        cursor = db.execute(_IS_OVERDUE)
        answers = [_answer(look, PostgresReads(db)) for look in looks]
        is_overdue = cursor.fetchone() == (True,)
        db.execute(b"COMMIT")
    if not is_overdue:
        return answers
    return [
        answer if isinstance(look, Unchecked) else OverdueError() for look, answer in zip(looks, answers, strict=True)
    ]


def _answer(look: Look, reads: PostgresReads) -> Any:
    try:
        return look(reads)
    except AglError as error:
        return error
