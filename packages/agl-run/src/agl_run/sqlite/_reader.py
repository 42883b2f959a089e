"""Threads that read from a SQLite file: what waits together is read in one transaction and answered in one go.

A read that comes while all threads are busy with others waits for the first that is free; a slow one holds up only
those that came in the same moment.
"""

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from agl.stores import Job, answer, new_job
from agl_run.sqlite._schema import connect, explain
from agl_run.sqlite._tables import next_deadline

THREADS = 4

MAX_BATCH = 64
"""Reads in one transaction at most."""

T = TypeVar("T")
Look: TypeAlias = Callable[[sqlite3.Connection], T]
_Read: TypeAlias = Job[Look[Any]]


class OverdueError(Exception):
    """An attempt's deadline has come and is not decided; the read did not take place."""


class Reader:
    """Runs reads on connections of its own, one for each of its threads."""

    def __init__(self, path: Path, *, clock: Callable[[], float], busy_s: float) -> None:
        self._path = path
        self._clock = clock
        self._busy_s = busy_s
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix=f"agl-reader {path.name}")
        self._waiting: deque[_Read] = deque()
        self._lock = threading.Lock()
        self._is_called = False
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    async def run(self, look: Look[T]) -> T:
        """What ``look`` finds; raises :class:`OverdueError` when the writer has to decide an attempt first."""
        read, future = new_job(look)
        with self._lock:
            if not self._is_called:
                self._executor.submit(self._work)
                self._is_called = True
            self._waiting.append(read)
        return await future

    def close(self) -> None:
        """Finish what waits and close the connections. Blocks; safe to call twice."""
        self._executor.shutdown(wait=True)
        while self._connections:
            self._connections.pop().close()

    def _work(self) -> None:
        """Runs in a thread until nothing waits; whoever comes while it reads calls another one."""
        while batch := self._take():
            try:
                self._look(batch)
            except Exception as error:  # noqa: BLE001  # each caller hears of it
                _fail(batch, explain(error, self._path) if isinstance(error, sqlite3.Error) else error)
            answer(batch, take_back=_nothing)

    def _take(self) -> list[_Read]:
        with self._lock:
            self._is_called = False
            return [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]

    def _look(self, batch: Sequence[_Read]) -> None:
        db = self._connection()
        db.execute("BEGIN")
        try:
            if next_deadline(db) <= self._clock():
                _fail(batch, OverdueError())
                return
            for read in batch:
                self._one(db, read)
        finally:
            db.execute("ROLLBACK")

    def _one(self, db: sqlite3.Connection, read: _Read) -> None:
        try:
            read.answer = read.work(db)
        except sqlite3.Error as error:
            read.error = explain(error, self._path)
        except Exception as error:  # noqa: BLE001  # a read's failure is its own caller's and harms no other
            read.error = error

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect(self._path, busy_s=self._busy_s, is_reader=True)
            self._connections.append(connection)
        return connection


def _fail(batch: Sequence[_Read], error: Exception) -> None:
    for read in batch:
        read.error = error


def _nothing(_: _Read) -> None:
    """A read whose caller went away has changed nothing."""
