"""``postgresql://user@host/database``: one schema of a PostgreSQL database, for many machines at once.

Every write is acknowledged after its commit. A store object has one thread that writes and commits all waiting work
together, a few threads that read, and one that listens for changes once a caller waits; each has its own connection.
A commit wakes waiting callers on every machine. Leases and time limits use the server's clock, so the machines' clocks
do not matter. If the server goes away, the store waits for it for about half a minute.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import psycopg

from agl.stores import Reads, Tables, TableStore, WakeUp, Work
from agl_store_postgres._reads import PartitionedReads, PostgresReads
from agl_store_postgres.connections import START_WAIT_S, Connection, connect, connect_in_time, forked_error
from agl_store_postgres.faults import explain, is_shared
from agl_store_postgres.layout import prepare
from agl_store_postgres.listener import ChangeListener
from agl_store_postgres.maintenance import compact, row_bytes
from agl_store_postgres.partition_layout import prepare_control, prepare_spans
from agl_store_postgres.partitions import Aim
from agl_store_postgres.reader import BatchReader, UncheckedRead
from agl_store_postgres.sweeping import QUIET_S, Sweeper, sweep_partitions
from agl_store_postgres.urls import DatabaseTarget, target_of
from agl_store_postgres.writer import BatchWriter
from agl_store_sqlite.sql import Batches, Compaction, OverdueError

T = TypeVar("T")


class PostgresStore(TableStore):
    """A :class:`agl.contracts.Store` in one schema of a PostgreSQL database.

    It may be used from several threads and event loops at once. A forked process must open its own.

    Args:
        url: ``postgresql://user:password@host:port/database`` as libpq reads it, with all of libpq's options and four
            more: ``schema`` (default ``agl``), created if it is missing; ``readers`` (default 4), the most connections
            for reads; ``pool=transaction`` behind a pooler such as PgBouncer; and ``partition``, one of ``hour``,
            ``day``, ``week`` and ``month``, which partitions the spans by the time at which their rollouts were made.

    Raises:
        ConfigError: The URL cannot be read, or names another partition than the store has.
        SchemaVersionError: A newer release wrote the schema.
        StoreError: The database cannot be used; the message gives reason and remedy, and no password.
    """

    def __init__(self, url: str) -> None:
        self._target = target_of(url)
        backend = _Postgres(self._target)
        self._sweep = backend.sweep
        super().__init__(backend)

    async def compact(self) -> Compaction:
        """Drop partitions that are not needed, and make the space of removed rows usable again (``VACUUM``).

        Nobody has to wait for more than a moment.
        """
        return await asyncio.to_thread(compact, self._target, is_full=False, sweep=self._sweep)

    async def vacuum(self) -> Compaction:
        """Write every table anew without unused space (``VACUUM FULL``); other users of the table wait meanwhile."""
        return await asyncio.to_thread(compact, self._target, is_full=True, sweep=self._sweep)

    async def size(self) -> int:
        """Return the bytes of all rows, without indexes; it reads every table, but not the spans' contents."""
        return await asyncio.to_thread(self._size)

    def _size(self) -> int:
        self._sweep()
        return row_bytes(self._target)


class _Postgres:
    """Implements :class:`agl.stores.Backend`."""

    def __init__(self, target: DatabaseTarget) -> None:
        self.shown_url = target.shown
        self._target = target
        self._pid = os.getpid()
        self._stopping = threading.Event()
        connection, feed, self._is_partitioned = _open(target)
        told = partial(explain, shown=target.shown)
        self._write = BatchWriter(
            target,
            connection=connection,
            feed=feed,
            stopping=self._stopping,
            on_change=self._on_change,
            is_partitioned=self._is_partitioned,
        )
        self._writer = Batches(self._write, shown_url=target.shown, explain=told, is_shared=is_shared)
        reads = partial(PartitionedReads, aim=Aim()) if self._is_partitioned else PostgresReads
        self._read = BatchReader(target, stopping=self._stopping, reads=reads)
        self._reader = Batches(
            self._read, shown_url=target.shown, explain=told, is_shared=is_shared, threads=target.readers
        )
        self.queued, self.changed = WakeUp(on_wait=self._on_wait), WakeUp(on_wait=self._on_wait)
        self._listener = ChangeListener(target, feed=feed, wake_ups=(self.queued, self.changed), expire=self._expire)
        self._sweeper = Sweeper(self.sweep, shown=target.shown, quiet_s=QUIET_S)
        if self._is_partitioned:
            self._sweeper.wake()

    def sweep(self) -> None:
        """Remove the spans of rollouts that are gone; without partitions, they went with them."""
        if self._is_partitioned:
            sweep_partitions(self._target)

    async def write(self, work: Work[T]) -> T:
        self._check_process()
        answer = await self._writer.run(work, undo=work.undo)
        if self._is_partitioned and work.act.__name__ == "delete":
            self._sweeper.wake()
        return answer

    async def read(self, look: Callable[[Reads], T]) -> T:
        self._check_process()
        try:
            return await self._reader.run(look)
        except OverdueError:
            await self._writer.run(Work(act=_do_nothing))
        return await self._reader.run(UncheckedRead(look))  # another machine may be deciding them just now

    async def close(self) -> None:
        if os.getpid() == self._pid:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._sweeper.close()
        self._stopping.set()
        self._writer.close()
        self._write.close()
        self._reader.close()
        self._read.close()
        self._listener.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error(self._target)

    def _on_wait(self) -> float:
        self._listener.start()
        return math.inf

    def _on_change(self) -> None:
        self._listener.hear_own()

    def _expire(self) -> None:
        """Submit empty work: the writer decides overdue attempts before any work."""
        self._writer.submit(Work(act=_do_nothing))


def _do_nothing(_: Tables) -> None:
    """Do nothing; the transaction around it still decides overdue attempts."""


def _open(target: DatabaseTarget) -> tuple[Connection, int, bool]:
    """Open the first connection and prepare the tables.

    Returns it with the number of the store's feed, and whether its spans are partitioned.
    """
    connection = connect_in_time(lambda: connect(target), target, threading.Event(), limit_s=START_WAIT_S)
    try:
        feed = prepare(connection, target)
        if is_partitioned := prepare_control(connection, target):
            prepare_spans(connection, target)
        return connection, feed, is_partitioned
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg.Error):
            raise explain(error, target.shown) from error
        raise
