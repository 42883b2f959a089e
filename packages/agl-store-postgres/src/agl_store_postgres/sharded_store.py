"""``postgresql+shards://control/database?shards=URL,URL``: the spans of one store on several PostgreSQL servers.

The control server has rollouts, attempts, leases, changes, versions and statistics. The shards have the spans; all
spans of a rollout are on one shard. A shard that does not answer delays only writes and reads of its own spans.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

import psycopg

from agl.contracts import PAGE_BYTES, Recording, RolloutQuery, SpanChoice
from agl.schemas import Span
from agl.stores import Reads, TableStore, Work
from agl_store_postgres._shard_reads import MissingSpansError, ThreadShards, unnamed
from agl_store_postgres.connections import Connection, access_of
from agl_store_postgres.faults import explain, is_shared
from agl_store_postgres.layout import prepare
from agl_store_postgres.listener import channel_to
from agl_store_postgres.maintenance import compact, row_bytes, table_bytes
from agl_store_postgres.partition_layout import prepare_control, prepare_spans
from agl_store_postgres.placing import Placing, Shard, UnnamedShardError, spans_of
from agl_store_postgres.reader import reader_of
from agl_store_postgres.shard_layout import prepare_shards
from agl_store_postgres.shard_writer import AwayShardError, ShardWriter
from agl_store_postgres.sweeping import QUIET_S, Sweeper, sweep
from agl_store_postgres.urls import DatabaseTarget, ShardedTarget, sharded_target_of
from agl_store_sqlite.sql.batches import Batches
from agl_store_sqlite.sql.compaction import Compaction
from agl_store_sqlite.sql.servers import START_WAIT_S, ServerBackend

T = TypeVar("T")

Lane = Batches[Work[Any]]
"""The queue of a thread that writes, with its own connections."""


class ShardedPostgresStore(TableStore):
    """A :class:`agl.contracts.Store` whose spans lie on several PostgreSQL servers.

    It may be used from several threads and event loops at once. A forked process must open its own.

    Args:
        url: The control server's URL with the scheme ``postgresql+shards://`` and the option ``shards``: the URLs of
            the shards, separated by commas, in any order. A shard that is added gets only new rollouts; a shard that
            holds rollouts cannot be left out. A shard's URL that contains a ``&`` or a comma must be percent-encoded as
            a whole.

    Raises:
        ConfigError: The URL cannot be read, or leaves out a shard that holds rollouts.
        SchemaVersionError: A newer release wrote a schema.
        StoreError: A database cannot be used, or belongs to another store; the message shows no password.
    """

    def __init__(self, url: str) -> None:
        self._target = sharded_target_of(url)
        self._sharded = _Sharded(self._target)
        super().__init__(self._sharded)
        self._with_spans = TableStore(_SpanReads(self._sharded))

    def place(self, rollout_id: str) -> int:
        """Return the number of the shard that a new rollout of that id gets."""
        return self._sharded.placing.place(rollout_id)

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        """See :meth:`agl.contracts.Store.spans`."""
        return await self._with_spans.spans(rollout_id, attempt_id=attempt_id, after=after, limit=limit)

    async def recordings(
        self, query: RolloutQuery, *, spans: SpanChoice = "deciding", max_bytes: int = PAGE_BYTES
    ) -> list[Recording]:
        """See :meth:`agl.contracts.Store.recordings`."""
        return await self._with_spans.recordings(query, spans=spans, max_bytes=max_bytes)

    async def compact(self) -> Compaction:
        """Make the space of removed rows usable again (``VACUUM``); nobody has to wait meanwhile."""
        return await self._compact(is_full=False)

    async def vacuum(self) -> Compaction:
        """Rewrite every table without unused space (``VACUUM FULL``); other users of the table wait meanwhile."""
        return await self._compact(is_full=True)

    async def size(self) -> int:
        """Return the bytes of all rows on all servers, without indexes; it reads every table, but no contents."""
        await asyncio.to_thread(self._sharded.sweep)
        return sum(await self._everywhere(row_bytes))

    async def _compact(self, *, is_full: bool) -> Compaction:
        before = sum(await self._everywhere(table_bytes))
        await asyncio.to_thread(self._sharded.sweep)
        done = await self._everywhere(partial(compact, is_full=is_full))
        return Compaction(before=before, after=sum(each.after for each in done))

    async def _everywhere(self, work: Callable[[DatabaseTarget], T]) -> list[T]:
        return [await asyncio.to_thread(work, each) for each in (self._target.control, *self._target.shards)]


class _Sharded:
    """Implements :class:`agl.stores.Backend`; reads are answered by the control server alone unless they need spans."""

    def __init__(self, target: ShardedTarget) -> None:
        self.shown_url, self._target = target.shown, target
        self._stopping = threading.Event()
        connection, self._feed, shards, is_partitioned = _open(target)
        self.placing = Placing(shards={shard.number: shard for shard in shards}, is_partitioned=is_partitioned)
        self.sweep = partial(sweep, target.control, self.placing)
        self._sweeper = Sweeper(self.sweep, shown=target.shown, quiet_s=QUIET_S if is_partitioned else 0.0)
        self._writers: list[ShardWriter] = []
        self._lock = threading.Lock()
        self._own_lanes: dict[int, Lane] = {}
        control, self._spans = self._lane(connection=connection), self._lane()
        self._shards = ThreadShards(self.placing, stopping=self._stopping)
        self._readers = [reader_of(target.control, stopping=self._stopping, reads=self._shards.reads) for _ in "ab"]
        plain_reads, self._span_reads = (self._batches(each, threads=target.control.readers) for each in self._readers)
        self._backend = ServerBackend(
            target.shown,
            writer=control,
            reader=plain_reads,
            subscribe=channel_to(target.control, feed=self._feed, stopping=self._stopping),
            closing=(self._span_reads, *self._readers, self._shards),
            stopping=self._stopping,
        )
        self.read, self.queued, self.changed = self._backend.read, self._backend.queued, self._backend.changed
        self._sweeper.wake()

    async def write(self, work: Work[T]) -> T:
        if not spans_of(work):
            answer = await self._backend.write(work)
            if work.act.__name__ == "delete":
                self._sweeper.wake()
            return answer
        self._backend.check_process()
        try:
            return await self._spans.run(work, undo=work.undo)
        except AwayShardError as away:
            return await self._own_lane(away.number).run(work, undo=work.undo)

    async def read_spans(self, look: Callable[[Reads], T]) -> T:
        """Like :meth:`read`, for reads that need spans; if a shard does not answer, only such reads are delayed."""
        try:
            return await self._backend.read_with(self._span_reads, look)
        except MissingSpansError:  # the rollout may have been removed in between
            return await self._backend.read_with(self._span_reads, look)

    async def close(self) -> None:
        if self._backend.is_of_this_process:
            await asyncio.to_thread(self._sweeper.close)
            self._stopping.set()
            await asyncio.to_thread(self._close_lanes)
            await self._backend.close()
            for writer in self._writers:
                await asyncio.to_thread(writer.close)

    def _close_lanes(self) -> None:
        with self._lock:
            lanes = [self._spans, *self._own_lanes.values()]
        for lane in lanes:
            lane.close()

    def _lane(self, *, connection: Connection | None = None, waits: bool = False) -> Lane:
        writer = ShardWriter(
            self._target.control,
            placing=self.placing,
            connection=connection,
            feed=self._feed,
            stopping=self._stopping,
            on_change=self._on_change,
            waits=waits,
            is_partitioned=self.placing.is_partitioned,
        )
        self._writers.append(writer)
        return self._batches(writer)

    def _batches(self, act: Callable[[Sequence[Any]], Sequence[Any]], *, threads: int = 1) -> Batches[Any]:
        return Batches(act, shown_url=self.shown_url, explain=self._explain, is_shared=is_shared, threads=threads)

    def _own_lane(self, number: int) -> Lane:
        """Return the lane of a shard that does not answer, in which only the writes to that shard wait."""
        with self._lock:
            if number not in self._own_lanes:
                self._own_lanes[number] = self._lane(waits=True)
                if self._stopping.is_set():
                    self._own_lanes[number].close()
            return self._own_lanes[number]

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, UnnamedShardError):
            return unnamed(f"a server that {self.shown_url} leaves out", error.number)
        return explain(error, self.shown_url)

    def _on_change(self) -> None:
        if self._target.control.is_pooled:  # a pooler passes no message on, also none to this process
            self._backend.listener.wake_all()


class _SpanReads:
    """The backend of a store in shards, with :meth:`_Sharded.read_spans` in place of ``read``."""

    def __init__(self, sharded: _Sharded) -> None:
        self.shown_url, self.queued, self.changed = sharded.shown_url, sharded.queued, sharded.changed
        self.write, self.read, self.close = sharded.write, sharded.read_spans, sharded.close


def _open(target: ShardedTarget) -> tuple[Connection, int, Sequence[Shard], bool]:
    """Open the first connection and prepare all tables.

    Returns the connection, the number of the change feed, the shards, and whether the spans are partitioned.
    """
    with ExitStack() as stack:
        control, *shards = (stack.enter_context(closing(_connected(each))) for each in (target.control, *target.shards))
        try:
            feed = prepare(control, target.control, is_sharded=True)
            found = prepare_shards(control, shards, target)
            is_partitioned = prepare_control(control, target.control)
            for shard, where in zip(shards, target.shards, strict=True):
                if is_partitioned:
                    prepare_spans(shard, where)
        except psycopg.Error as error:
            raise explain(error, target.shown) from error
        for shard in shards:
            shard.close()
        stack.pop_all()
        return control, feed, found, is_partitioned


def _connected(target: DatabaseTarget) -> Connection:
    return access_of(target).connect_in_time(threading.Event(), limit_s=START_WAIT_S)
