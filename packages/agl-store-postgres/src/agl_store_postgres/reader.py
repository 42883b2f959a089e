"""Threads that read: what waits together is read in one transaction, on a snapshot, and answered in one go."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import psycopg

from agl.errors import StoreError
from agl.stores import Job, answer, engine, new_job
from agl_store_postgres.faults import explain, is_lost
from agl_store_postgres.links import RESTART_WAIT_S, Connection, Link, closed_here
from agl_store_postgres.loading import NOW
from agl_store_postgres.urls import Target

MAX_BATCH = 64
"""Reads in one transaction at most."""

T = TypeVar("T")
Look: TypeAlias = Callable[[Connection], T]
_Read: TypeAlias = Job[Look[Any]]

_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_IS_OVERDUE = b"SELECT (SELECT min(deadline) FROM attempts WHERE status = 'running') <= " + NOW


class OverdueError(Exception):
    """An attempt's deadline has come and is not decided; the read did not take place."""


class Reader:
    """Runs reads on connections of its own, one for each of its threads, opened when they are needed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._executor = ThreadPoolExecutor(target.readers, thread_name_prefix="agl-postgres-reader")
        self._waiting: deque[_Read] = deque()
        self._lock = threading.Lock()
        self._is_called = False
        self._local = threading.local()
        self._links: list[Link] = []

    async def run(self, look: Look[T], *, is_checked: bool = True) -> T:
        """What ``look`` finds; raises :class:`OverdueError` when the writer has to decide an attempt first.

        With ``is_checked`` false the read takes place whatever is overdue.
        """
        if os.getpid() != self._pid:
            raise closed_here(self._target)
        read, future = new_job(look if is_checked else _Unchecked(look))
        with self._lock:
            if self._stopping.is_set():
                raise engine.closed(self._target.shown)
            if not self._is_called:
                self._executor.submit(self._work)
                self._is_called = True
            self._waiting.append(read)
        return await future

    def close(self) -> None:
        """Finish what waits and close the connections. Blocks; safe to call twice."""
        with self._lock:
            self._stopping.set()
        self._executor.shutdown(wait=True)
        while self._links:
            self._links.pop().drop()

    def _work(self) -> None:
        """Runs in a thread until nothing waits; whoever comes while it reads calls another one."""
        while batch := self._take():
            self._look(batch)

    def _take(self) -> list[_Read]:
        with self._lock:
            self._is_called = False
            return [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]

    def _look(self, batch: Sequence[_Read]) -> None:
        """Read together, or each by itself when together they fail."""
        try:
            self._patiently(batch)
        except Exception as error:  # noqa: BLE001  # each caller hears of it
            is_shared = len(batch) > 1 and not isinstance(error, StoreError)
            for read in batch if is_shared else ():
                self._look([read])
            for read in () if is_shared else batch:
                read.error = explain(error, self._target.shown)
            if not is_shared:
                answer(batch, take_back=_nothing)

    def _patiently(self, batch: Sequence[_Read]) -> None:
        """Read, again on a new connection while the server is away."""
        link = self._link()
        end = time.monotonic() + RESTART_WAIT_S
        while True:
            db = link.open()
            try:
                _read_all(db, batch)
                return
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


class _Unchecked:
    """A read that takes place whatever is overdue."""

    def __init__(self, look: Look[Any]) -> None:
        self._look = look

    def __call__(self, db: Connection) -> Any:
        return self._look(db)


def _read_all(db: Connection, batch: Sequence[_Read]) -> None:
    """Answer every read. The transaction begins with the first query that waits for rows, and ends after the answer."""
    with db.pipeline():
        db.execute(_BEGIN)
        cursor = db.execute(_IS_OVERDUE)
        for read in batch:
            _one(db, read)
        if cursor.fetchone() == (True,):
            for read in batch:
                read.error = read.error if isinstance(read.work, _Unchecked) else OverdueError()
        answer(batch, take_back=_nothing)
        db.execute(b"COMMIT")


def _one(db: Connection, read: _Read) -> None:
    read.error = None
    try:
        read.answer = read.work(db)
    except StoreError as error:
        read.error = error


def _nothing(_: _Read) -> None:
    """A read whose caller went away has changed nothing."""
