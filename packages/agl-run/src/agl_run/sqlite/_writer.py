"""The one thread that writes to a SQLite file: it commits whatever waits together, and answers after the commit."""

import asyncio
import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias

from agl.stores import Bell, Job, Packer, answer, engine, new_job
from agl_run.sqlite._schema import explain
from agl_run.sqlite._tables import SQLiteTables, next_deadline

MAX_BATCH = 256
"""Operations in one transaction at most."""

Work: TypeAlias = Callable[[SQLiteTables], Any]
Undo: TypeAlias = Callable[[Any], Work]
_Job: TypeAlias = Job[Work]

_logger = logging.getLogger(__name__)


class Writer:
    """Runs operations in its thread, many in one transaction, each in a savepoint of its own.

    While somebody waits it also decides overdue attempts when their time comes, and looks every ``poll_s`` seconds
    whether another connection has changed the file.

    Attributes:
        queue_bell: Rings when a rollout was queued.
        feed_bell: Rings when the change feed grew.
        is_closed: It takes no more work.
    """

    def __init__(
        self, connection: sqlite3.Connection, *, path: Path, clock: Callable[[], float], poll_s: float
    ) -> None:
        self._db = connection
        self._path = path
        self._clock = clock
        self._poll_s = poll_s
        self._jobs: SimpleQueue[_Job | Literal["look", "stop"]] = SimpleQueue()
        self._packer = Packer()
        self._tables = SQLiteTables(connection, self._packer)
        self._data_version = 0
        self._next_deadline = math.inf
        self._lock = threading.Lock()
        self.is_closed = False
        self.queue_bell = Bell(on_wait=self._look_now)
        self.feed_bell = Bell(on_wait=self._look_now)
        self._thread = threading.Thread(target=self._run, name=f"agl-writer {path.name}", daemon=True)
        self._thread.start()

    async def run(self, work: Work, *, undo: Undo | None = None) -> Any:
        """The answer of ``work`` once it is committed; ``undo`` takes it back if the caller is cancelled meanwhile."""
        job, future = new_job(work, undo=undo)
        if not self._submit(job):
            raise engine.closed(f"sqlite:///{self._path}")
        try:
            return await future
        except asyncio.CancelledError:
            if not job.is_abandoned:
                self._take_back(job)
            raise

    def close(self) -> None:
        """Finish what waits, end the thread and close the connection. Blocks; safe to call twice."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._jobs.put("stop")
        self._thread.join()
        self.queue_bell.ring()
        self.feed_bell.ring()

    def _submit(self, job: _Job) -> bool:
        with self._lock:
            if not self.is_closed:
                self._jobs.put(job)
            return not self.is_closed

    def _look_now(self) -> None:
        """Let the thread see that somebody waits now."""
        self._jobs.put("look")

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = self._collect()
            is_open = "stop" not in batch
            jobs = [job for job in batch if isinstance(job, Job) and not job.is_abandoned]
            if jobs or self._next_deadline <= self._clock():
                self._commit(jobs)
            self._look_around()
        self._db.close()

    def _collect(self) -> list[_Job | Literal["look", "stop"]]:
        """What waits; empty when it is time to look at deadlines or at changes from elsewhere."""
        batch: list[_Job | Literal["look", "stop"]] = []
        try:
            batch.append(self._jobs.get(timeout=self._pause_s()))
            while len(batch) < MAX_BATCH:
                batch.append(self._jobs.get_nowait())
        except Empty:
            pass
        return batch

    def _pause_s(self) -> float | None:
        if not self._is_awaited:
            return None
        return max(0.0, min(self._poll_s, self._next_deadline - self._clock()))

    @property
    def _is_awaited(self) -> bool:
        return self.queue_bell.is_awaited or self.feed_bell.is_awaited

    def _commit(self, jobs: Sequence[_Job]) -> None:
        try:
            if next_deadline(self._db) <= self._clock():
                self._transact(self._expire)
            if jobs:
                self._transact(lambda: self._attempt_all(jobs))
        except Exception as error:  # noqa: BLE001 - the thread outlives every failure, and each caller hears of it
            for job in jobs:
                job.error = self._explain(error)
        answer(jobs, take_back=self._take_back)

    def _transact(self, act: Callable[[], None]) -> None:
        self._tables.begin()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            act()
            self._db.execute("COMMIT")
        except BaseException:
            self._packer.clear()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if self._tables.has_queued:
            self.queue_bell.ring()
        if self._tables.has_changed:
            self.feed_bell.ring()

    def _expire(self) -> None:
        engine.expire(self._tables, now=self._clock())

    def _attempt_all(self, jobs: Sequence[_Job]) -> None:
        if len(jobs) == 1:
            jobs[0].answer = jobs[0].work(self._tables)
            return
        for job in jobs:
            self._attempt(job)

    def _attempt(self, job: _Job) -> None:
        self._db.execute("SAVEPOINT job")
        try:
            job.answer = job.work(self._tables)
        except Exception as error:  # noqa: BLE001 - an operation's failure is its own caller's and harms no other
            job.error = self._explain(error)
            self._db.execute("ROLLBACK TO job")
            self._packer.clear()
        self._db.execute("RELEASE job")

    def _explain(self, error: Exception) -> Exception:
        return explain(error, self._path) if isinstance(error, sqlite3.Error) else error

    def _take_back(self, job: _Job) -> None:
        if job.undo is not None and job.error is None and job.answer:
            self._submit(Job(work=job.undo(job.answer)))

    def _look_around(self) -> None:
        """While somebody waits: note the next deadline, and wake the waiting when others changed the file."""
        self._next_deadline = math.inf
        if not self._is_awaited:
            return
        try:
            self._next_deadline = next_deadline(self._db)
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            _logger.warning("the store %s could not be read and is tried again", self._path, exc_info=True)
            return
        if version != self._data_version:
            self._data_version = version
            self.queue_bell.ring()
            self.feed_bell.ring()
