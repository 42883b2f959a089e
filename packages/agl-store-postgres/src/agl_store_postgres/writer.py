"""The one thread of a store object that writes: it commits whatever waits together, and answers after the commit.

It outlives the server: a transaction whose connection broke is done again on a new one, for a limited time. Where the
commit was under way nobody knows whether it happened; everything may be repeated then, because ids come from the
caller and every claim has an id.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias

import psycopg

from agl.errors import StoreError
from agl.stores import Job, Packer, answer, engine, new_job
from agl_store_postgres._tables import PostgresTables
from agl_store_postgres.faults import explain, is_collision, is_lost
from agl_store_postgres.links import RESTART_WAIT_S, Connection, Link, closed_here
from agl_store_postgres.loading import begin, begin_lapsed
from agl_store_postgres.urls import Target
from agl_store_postgres.work import Work
from agl_store_postgres.writing import commit

MAX_BATCH = 256
"""Operations in one transaction at most."""

MAX_COLLISIONS = 5
"""How often a transaction is repeated because another one came between."""

_Job: TypeAlias = Job[Work]


class Writer:
    """Runs operations in its thread, many in one transaction.

    Attributes:
        is_closed: It takes no more work.
    """

    def __init__(self, target: Target, *, connection: Connection, feed: int) -> None:
        self._target = target
        self._feed = feed
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._link = Link(target, stopping=self._stopping, connection=connection)
        self._packer = Packer()
        self._jobs: SimpleQueue[_Job | Literal["stop"]] = SimpleQueue()
        self._is_committing = False
        self._lock = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="agl-postgres-writer", daemon=True)
        self._thread.start()

    async def run(self, work: Work, *, undo: Callable[[Any], Work] | None = None) -> Any:
        """The answer of ``work`` once it is committed; ``undo`` takes it back if the caller is cancelled meanwhile."""
        job, future = new_job(work, undo=undo)
        if not self.submit(job):
            raise engine.closed(self._target.shown)
        try:
            return await future
        except asyncio.CancelledError:
            if not job.is_abandoned:
                self._take_back(job)
            raise

    def submit(self, job: _Job) -> bool:
        """Queue a job; false when the store was closed."""
        if os.getpid() != self._pid:
            raise closed_here(self._target)
        with self._lock:
            if not self.is_closed:
                self._jobs.put(job)
            return not self.is_closed

    def close(self) -> None:
        """Finish what waits, end the thread and close the connection. Blocks; safe to call twice."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._stopping.set()
                self._jobs.put("stop")
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = self._collect()
            is_open = "stop" not in batch
            jobs = [job for job in batch if isinstance(job, Job) and not job.is_abandoned]
            for group in _groups(jobs):
                self._commit(group)
                answer(group, take_back=self._take_back)
        self._link.drop()

    def _collect(self) -> list[_Job | Literal["stop"]]:
        batch: list[_Job | Literal["stop"]] = [self._jobs.get()]
        try:
            while len(batch) < MAX_BATCH:
                batch.append(self._jobs.get_nowait())
        except Empty:
            pass
        return batch

    def _take_back(self, job: _Job) -> None:
        if job.undo is not None and job.error is None and job.answer:
            self.submit(Job(work=job.undo(job.answer)))

    def _commit(self, jobs: Sequence[_Job]) -> None:
        """Do the jobs in one transaction, or each in its own when together they fail."""
        try:
            self._transact(jobs)
        except Exception as error:  # noqa: BLE001 - the thread outlives every failure, and each caller hears of it
            is_shared = len(jobs) > 1 and not isinstance(error, StoreError) and not is_lost(error, self._link.current)
            for job in jobs if is_shared else ():
                self._commit([job])
            for job in () if is_shared else jobs:
                job.error = explain(error, self._target.shown)

    def _transact(self, jobs: Sequence[_Job]) -> None:
        """One transaction, repeated while it collides with others or the server is away."""
        end = time.monotonic() + RESTART_WAIT_S
        collisions, is_repeat = 0, False
        while True:
            db = self._link.open()
            self._is_committing = False
            try:
                self._attempt(db, jobs, is_repeat=is_repeat)
                return
            except BaseException as error:
                self._packer.clear()
                is_repeat |= self._is_committing
                if is_lost(error, db) or not _rolled_back(db):
                    self._link.drop()
                    if time.monotonic() > end:
                        raise
                    continue
                collisions += 1
                if not isinstance(error, psycopg.Error) or not is_collision(error) or collisions > MAX_COLLISIONS:
                    raise

    def _attempt(self, db: Connection, jobs: Sequence[_Job], *, is_repeat: bool) -> None:
        needs = [job.work.repeat_needs or job.work.needs if is_repeat else job.work.needs for job in jobs]
        loaded = begin(db, needs)
        if loaded.next_deadline <= loaded.now:
            db.rollback()
            self._expire(db)
            loaded = begin(db, needs)
        tables = PostgresTables(loaded, self._packer, is_repeat=is_repeat)
        for job in jobs:
            job.error = None
            try:
                job.answer = job.work.act(tables)
            except Exception as error:  # noqa: BLE001 - an operation's failure is its own caller's and harms no other
                job.error = error
        tables.changes.has_queued |= tables.has_spare
        self._finish(db, tables)

    def _expire(self, db: Connection) -> None:
        """Decide overdue attempts, but those that another machine is deciding just now."""
        loaded, lapsed = begin_lapsed(db)
        tables = PostgresTables(loaded, self._packer, lapsed=lapsed)
        engine.expire(tables, now=tables.now)
        self._finish(db, tables)

    def _finish(self, db: Connection, tables: PostgresTables) -> None:
        self._is_committing = True
        commit(db, tables.changes, feed=self._feed)
        self._is_committing = False


def _rolled_back(db: Connection) -> bool:
    """Roll back, which also makes psycopg forget the statements that were prepared in vain; false when that fails."""
    try:
        db.rollback()
    except psycopg.Error:
        return False
    return True


def _groups(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """The jobs in order, those that must be alone by themselves."""
    groups: list[list[_Job]] = []
    for job in jobs:
        if job.work.is_alone or not groups or groups[-1][-1].work.is_alone:
            groups.append([])
        groups[-1].append(job)
    return groups
