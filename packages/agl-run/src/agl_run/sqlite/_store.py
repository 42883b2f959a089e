"""``sqlite:///runs.db``: the default store, one file, durable, for several threads, event loops and processes.

Every write is acknowledged after a commit that reached the disk (WAL with ``synchronous = FULL``). One thread for each
store object writes and commits whatever waits together; reads run in a few threads on connections of their own. Who
waits in this process is woken by the commit; a change from another process, or from another store object, is noticed
within ``poll_s`` seconds, and only while somebody waits. The file must be on a local disk: WAL needs shared memory.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from agl.contracts import Change, Metric, RolloutQuery
from agl.schemas import Attempt, Claim, Outcome, ResourceVersion, Rollout, Span
from agl.stores import engine
from agl_run.sqlite import _reads as reads
from agl_run.sqlite._reader import Look, OverdueError, Reader
from agl_run.sqlite._schema import open_file, path_of
from agl_run.sqlite._tables import SQLiteTables
from agl_run.sqlite._writer import Writer

_T = TypeVar("_T")


class SQLiteStore:
    """A :class:`agl.contracts.Store` in one SQLite file.

    Args:
        url: ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; a missing folder is created.
        clock: Unix seconds; leases and time limits follow it.
        poll_s: How soon changes from other processes are noticed, in seconds.
        busy_s: How long to wait for another process's transaction, in seconds.

    Raises:
        StoreError: The file cannot be used; the message says why and what to do.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], float] = time.time, poll_s: float = 0.05, busy_s: float = 30.0
    ) -> None:
        self.url = url
        self._path = path_of(url)
        self._clock = clock
        self._writer = Writer(open_file(self._path, busy_s=busy_s), path=self._path, clock=clock, poll_s=poll_s)
        self._reader = Reader(self._path, clock=clock, busy_s=busy_s)

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """See the contract."""
        return await self._writer.run(lambda tables: engine.enqueue(tables, rollouts, now=self._clock()))

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
        whoever repeats the request, until their leases lapse.
        """

        def work(tables: SQLiteTables) -> list[Claim]:
            return engine.claim(
                tables,
                worker=worker,
                limit=limit,
                lease_s=lease_s,
                experiment=experiment,
                claim_id=claim_id,
                now=self._clock(),
            )

        def undo(claims: list[Claim]) -> Callable[[SQLiteTables], None]:
            return partial(engine.unclaim, claims=claims)

        bell = self._writer.queue_bell
        end = time.monotonic() + wait_s
        while True:
            seen = bell.count
            claims: list[Claim] = await self._writer.run(work, undo=None if claim_id else undo)
            left_s = end - time.monotonic()
            if claims or left_s <= 0:
                return claims
            await bell.wait(seen, left_s)

    async def renew(self, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
        """See the contract."""
        work = partial(engine.renew, attempt_ids=attempt_ids, lease_s=lease_s)
        return await self._writer.run(lambda tables: work(tables, now=self._clock()))

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
        """See the contract."""
        return await self._writer.run(lambda tables: engine.finish(tables, outcomes, now=self._clock()))

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """See the contract."""
        return await self._writer.run(lambda tables: engine.cancel(tables, rollout_ids, now=self._clock()))

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0) -> list[Change]:
        """See the contract."""
        bell = self._writer.feed_bell
        end = time.monotonic() + wait_s
        while True:
            seen = bell.count
            found = await self._read(lambda db: reads.changes(db, after, limit))
            left_s = end - time.monotonic()
            if found or left_s <= 0:
                return found
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
        await self._writer.run(lambda tables: engine.append_spans(tables, spans))

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        """See the contract."""
        return await self._read(lambda db: reads.spans(db, rollout_id, attempt_id, after=after, limit=limit))

    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        """See the contract."""
        await self._writer.run(lambda tables: engine.publish(tables, versions))

    async def resource(self, name: str, version: str | None = None) -> ResourceVersion:
        """See the contract."""
        return await self._read(lambda db: reads.resource(db, name, version))

    async def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """See the contract."""
        return await self._read(lambda db: reads.resources(db, name))

    async def save_state(self, states: Mapping[str, bytes]) -> None:
        """See the contract."""
        await self._writer.run(lambda tables: tables.save_state(states))

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        """See the contract."""
        return await self._read(lambda db: reads.states(db, prefix))

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """See the contract."""
        await self._writer.run(lambda tables: tables.log_metrics(metrics))

    async def metrics(self, experiment: str, *, name: str | None = None) -> list[Metric]:
        """See the contract."""
        return await self._read(lambda db: reads.metrics(db, experiment, name))

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """See the contract."""
        return await self._writer.run(lambda tables: engine.delete(tables, rollout_ids))

    async def close(self) -> None:
        """See the contract."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.close()
        self._reader.close()

    async def _read(self, look: Look[_T]) -> _T:
        """What ``look`` finds in one read transaction, after overdue attempts were decided."""
        while not self._writer.is_closed:
            try:
                return await self._reader.run(look)
            except OverdueError:
                await self._writer.run(_expire_only)
        raise engine.closed(self.url)


def _expire_only(tables: SQLiteTables) -> Any:
    """Nothing: the writer decides overdue attempts at the start of every transaction."""
