"""``postgresql://user@host/database``: one schema of a PostgreSQL database, for many machines at once.

Every write is acknowledged after its commit. A store object has one thread that writes and commits all waiting work
together, a few threads that read, and one that listens for changes once a caller waits; each has its own connection.
A commit wakes waiting callers on every machine. Leases and time limits use the server's clock, so the machines' clocks
do not matter. If the server goes away, the store waits for it for about half a minute.
"""

import asyncio
import threading
from functools import partial
from typing import Any, TypeVar

import psycopg

from agl.stores import TableStore, Work
from agl_store_postgres._reads import PartitionedReads, PostgresReads
from agl_store_postgres.connections import Connection, access_of
from agl_store_postgres.faults import explain, is_shared
from agl_store_postgres.layout import prepare
from agl_store_postgres.listener import channel_to
from agl_store_postgres.maintenance import compact, row_bytes
from agl_store_postgres.partition_layout import prepare_control, prepare_spans
from agl_store_postgres.partitions import Aim
from agl_store_postgres.reader import reader_of
from agl_store_postgres.sweeping import QUIET_S, Sweeper, sweep_partitions
from agl_store_postgres.urls import DatabaseTarget, target_of
from agl_store_postgres.writer import BatchWriter
from agl_store_sqlite.sql.batches import Batches
from agl_store_sqlite.sql.compaction import Compaction
from agl_store_sqlite.sql.servers import START_WAIT_S, ServerBackend

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
        self._target = target
        stopping = threading.Event()
        connection, feed, self._is_partitioned = _open(target)
        write = BatchWriter(
            target,
            connection=connection,
            feed=feed,
            stopping=stopping,
            on_change=self._on_change,
            is_partitioned=self._is_partitioned,
        )
        reads = partial(PartitionedReads, aim=Aim()) if self._is_partitioned else PostgresReads
        read = reader_of(target, stopping=stopping, reads=reads)
        batches = partial(
            Batches[Any],
            shown_url=target.shown,
            explain=partial(explain, shown=target.shown),
            is_shared=is_shared,
        )
        self._backend = ServerBackend(
            target.shown,
            writer=batches(write),
            reader=batches(read, threads=target.readers),
            subscribe=channel_to(target, feed=feed, stopping=stopping),
            closing=(write, read),
            stopping=stopping,
        )
        self.shown_url, self.read = target.shown, self._backend.read
        self.queued, self.changed = self._backend.queued, self._backend.changed
        self._sweeper = Sweeper(self.sweep, shown=target.shown, quiet_s=QUIET_S)
        if self._is_partitioned:
            self._sweeper.wake()

    def sweep(self) -> None:
        """Remove the spans of rollouts that are gone; without partitions, they went with them."""
        if self._is_partitioned:
            sweep_partitions(self._target)

    async def write(self, work: Work[T]) -> T:
        answer = await self._backend.write(work)
        if self._is_partitioned and work.act.__name__ == "delete":
            self._sweeper.wake()
        return answer

    async def close(self) -> None:
        if self._backend.is_of_this_process:
            await asyncio.to_thread(self._sweeper.close)
            await self._backend.close()

    def _on_change(self) -> None:
        if self._target.is_pooled:  # a pooler passes no message on, also none to this process
            self._backend.listener.wake_all()


def _open(target: DatabaseTarget) -> tuple[Connection, int, bool]:
    """Open the first connection and prepare the tables.

    Returns it with the number of the store's feed, and whether its spans are partitioned.
    """
    connection = access_of(target).connect_in_time(threading.Event(), limit_s=START_WAIT_S)
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
