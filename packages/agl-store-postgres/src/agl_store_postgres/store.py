"""``postgresql://user@host/database``: one schema of a PostgreSQL database, for many machines at once.

Every write is acknowledged after its commit. A store object has one thread that writes, on one connection, and commits
whatever waits together; a few that read, each on its own; and, once somebody waits, one that listens. Who waits, on
any machine, is woken by the commit. Leases and time limits go by the server's clock, so the machines' clocks do not
matter. A server that goes away in between is waited for, about half a minute.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import psycopg

from agl.contracts import Change, Metric, RolloutQuery
from agl.schemas import Attempt, Claim, Outcome, ResourceVersion, Rollout, Span, new_trace_id
from agl.stores import Job, engine
from agl_store_postgres import reads, work
from agl_store_postgres.faults import explain
from agl_store_postgres.layout import prepare
from agl_store_postgres.links import START_WAIT_S, Connection, connect, wait_for
from agl_store_postgres.reader import Look, OverdueError, Reader
from agl_store_postgres.urls import Target, target_of
from agl_store_postgres.watch import Watch
from agl_store_postgres.writer import Writer

_T = TypeVar("_T")


class PostgresStore:
    """A :class:`agl.contracts.Store` in one schema of a PostgreSQL database.

    It may be used from several threads and event loops at once. A forked process must open its own.

    Args:
        url: ``postgresql://user:password@host:port/database`` as libpq takes it, with all of libpq's options, and with
            ``schema`` (default ``agl``), which is created if it is missing, and ``readers`` (default 4), the
            connections that read at most.

    Raises:
        ConfigError: The URL cannot be read.
        SchemaVersionError: A newer release wrote the schema.
        StoreError: The database cannot be used; the message says why and what to do, and shows no password.
    """

    def __init__(self, url: str) -> None:
        self._target = target_of(url)
        self._pid = os.getpid()
        connection, feed = _open(self._target)
        self._writer = Writer(self._target, connection=connection, feed=feed)
        self._reader = Reader(self._target)
        self._watch = Watch(self._target, feed=feed, expire=lambda: self._writer.submit(Job(work=work.nothing())))

    def __repr__(self) -> str:
        return f"PostgresStore({self._target.shown!r})"

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """See the contract."""
        return await self._writer.run(work.enqueue(rollouts))

    async def claim(
        self,
        *,
        worker: str,
        limit: int = 1,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        experiment: str | None = None,
        claim_id: str = "",
    ) -> list[Claim]:
        """See the contract.

        A caller that is cancelled meanwhile leaves the rollouts queued. With a ``claim_id`` the attempts stay open for
        whoever repeats the request, until their leases lapse. Without one the attempts carry an id of the store's own,
        under which it finds them again if the server goes away in the middle of the commit.
        """
        claiming = work.claim(
            worker=worker,
            limit=limit,
            lease_s=lease_s,
            experiment=experiment,
            claim_id=claim_id or new_trace_id(),
            is_new_claim=not claim_id,
        )
        bell = self._watch.queue_bell
        end = time.monotonic() + wait_s
        while True:
            seen = bell.count
            claims: list[Claim] = await self._writer.run(claiming, undo=None if claim_id else work.unclaim)
            left_s = end - time.monotonic()
            if claims or left_s <= 0:
                return claims
            self._watch.start()
            await bell.wait(seen, left_s)

    async def renew(self, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
        """See the contract."""
        return await self._writer.run(work.renew(attempt_ids, lease_s=lease_s))

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
        """See the contract."""
        return await self._writer.run(work.finish(outcomes))

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """See the contract."""
        return await self._writer.run(work.cancel(rollout_ids))

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0) -> list[Change]:
        """See the contract."""
        bell = self._watch.feed_bell
        end = time.monotonic() + wait_s
        while True:
            seen = bell.count
            found = await self._read(lambda db: reads.changes(db, after, limit))
            left_s = end - time.monotonic()
            if found or left_s <= 0:
                return found
            self._watch.start()
            await bell.wait(seen, left_s)

    async def cursor(self) -> int:
        """See the contract."""
        return await self._read(reads.cursor)

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """See the contract."""
        return await self._read(lambda db: reads.rollouts(db, query))

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        """See the contract."""
        return await self._read(lambda db: reads.attempts(db, rollout_id))

    async def append_spans(self, spans: Sequence[Span]) -> None:
        """See the contract."""
        await self._writer.run(work.append_spans(spans))

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        """See the contract."""
        return await self._read(lambda db: reads.spans(db, rollout_id, attempt_id, after=after, limit=limit))

    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        """See the contract."""
        await self._writer.run(work.publish(versions))

    async def resource(self, name: str, version: str | None = None) -> ResourceVersion:
        """See the contract."""
        return await self._read(lambda db: reads.resource(db, name, version))

    async def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """See the contract."""
        return await self._read(lambda db: reads.resources(db, name))

    async def save_state(self, states: Mapping[str, bytes]) -> None:
        """See the contract."""
        await self._writer.run(work.save_state(states))

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        """See the contract."""
        return await self._read(lambda db: reads.states(db, prefix))

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """See the contract."""
        await self._writer.run(work.log_metrics(metrics))

    async def metrics(self, experiment: str, *, name: str | None = None) -> list[Metric]:
        """See the contract."""
        return await self._read(lambda db: reads.metrics(db, experiment, name))

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """See the contract."""
        return await self._writer.run(work.delete(rollout_ids))

    async def close(self) -> None:
        """See the contract."""
        if os.getpid() == self._pid:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._watch.close()

    async def _read(self, look: Look[_T]) -> _T:
        """What ``look`` finds in one read transaction, after overdue attempts were decided."""
        if self._writer.is_closed:
            raise engine.closed(self._target.shown)
        try:
            return await self._reader.run(look)
        except OverdueError:
            await self._writer.run(work.nothing())
        return await self._reader.run(look, is_checked=False)  # another machine may be deciding them just now


def _open(target: Target) -> tuple[Connection, int]:
    """The first connection and the number of the store's feed, once the tables are there."""
    connection = wait_for(lambda: connect(target), target, threading.Event(), limit_s=START_WAIT_S)
    try:
        return connection, prepare(connection, target)
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg.Error):
            raise explain(error, target.shown) from error
        raise
