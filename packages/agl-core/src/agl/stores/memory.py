"""``memory://``: the store for tests, notebooks and dry runs; everything is gone when the process ends.

It follows the same rules as the durable stores and keeps spans packed, so that a call of 1,200 tokens takes less
than 8 KB and prompts share their prefix. One lock guards plain tables; no operation holds it while it waits.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from agl.contracts import Change, Metric, RolloutQuery
from agl.errors import StoreError
from agl.schemas import Attempt, Claim, Outcome, ResourceVersion, Rollout, Span
from agl.stores import engine, rules
from agl.stores._memory_tables import MemoryTables
from agl.stores.bell import Bell

_T = TypeVar("_T")


class MemoryStore:
    """A :class:`agl.contracts.Store` in this process's memory.

    Args:
        url: ``memory://``; every object is a store of its own.
        clock: Unix seconds; leases and time limits follow it.
    """

    def __init__(self, url: str = "memory://", *, clock: Callable[[], float] = time.time) -> None:
        if url.rstrip("/") != "memory:":
            raise StoreError(f"{url!r} is no URL of a memory store; write memory://, or sqlite:///runs.db for a file")
        self.url = url
        self._clock = clock
        self._lock = threading.RLock()
        self._tables = MemoryTables()
        self._states: dict[str, bytes] = {}
        self._metrics: dict[str, dict[tuple[str, int, str], Metric]] = {}
        self._queue_bell = Bell()
        self._feed_bell = Bell()
        self._is_closed = False

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """See the contract."""
        with self._work() as tables:
            return _copies(engine.enqueue(tables, rollouts, now=self._clock()))

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
        """See the contract."""

        def attempt() -> list[Claim]:
            with self._work() as tables:
                claims = engine.claim(
                    tables,
                    worker=worker,
                    limit=limit,
                    lease_s=lease_s,
                    experiment=experiment,
                    claim_id=claim_id,
                    now=self._clock(),
                )
                return [Claim(rollout=rules.copied(claim.rollout), attempt=claim.attempt) for claim in claims]

        return await self._until_found(attempt, self._queue_bell, wait_s)

    async def renew(self, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
        """See the contract."""
        with self._work() as tables:
            return engine.renew(tables, attempt_ids, lease_s=lease_s, now=self._clock())

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
        """See the contract."""
        with self._work() as tables:
            return _copies(engine.finish(tables, outcomes, now=self._clock()))

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """See the contract."""
        with self._work() as tables:
            return _copies(engine.cancel(tables, rollout_ids, now=self._clock()))

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0) -> list[Change]:
        """See the contract."""

        def look() -> list[Change]:
            with self._work() as tables:
                return tables.changes(after=after, limit=limit)

        return await self._until_found(look, self._feed_bell, wait_s)

    async def cursor(self) -> int:
        """See the contract."""
        with self._work() as tables:
            return tables.cursor

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """See the contract."""
        with self._work() as tables:
            if not query.ids:
                return _copies(tables.page(query))
            found = [engine.need_rollout(tables, rollout_id) for rollout_id in query.ids]
            return _copies(rules.select(found, query))

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        """See the contract."""
        with self._work() as tables:
            engine.need_rollout(tables, rollout_id)
            return tables.attempts(rollout_id)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        """See the contract."""
        with self._work() as tables:
            engine.append_spans(tables, spans)

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        """See the contract."""
        with self._work() as tables:
            which = engine.default_attempt(tables, rollout_id, attempt_id)
            return tables.spans(rollout_id, which, after=after, limit=limit)

    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        """See the contract."""
        with self._work() as tables:
            engine.publish(tables, versions)

    async def resource(self, name: str, version: str | None = None) -> ResourceVersion:
        """See the contract."""
        with self._work() as tables:
            found = tables.newest(name) if version is None else tables.version(name, version)
        if found is None:
            raise engine.unknown_resource(name, version)
        return found

    async def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """See the contract."""
        with self._work() as tables:
            if name is not None:
                return tables.versions(name)
            return [found for each in tables.names() if (found := tables.newest(each)) is not None]

    async def save_state(self, states: Mapping[str, bytes]) -> None:
        """See the contract."""
        with self._work():
            for key, value in states.items():
                self._states.pop(key, None)
                if value:
                    self._states[key] = bytes(value)

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        """See the contract."""
        with self._work():
            return {key: self._states[key] for key in sorted(self._states) if key.startswith(prefix)}

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """See the contract."""
        with self._work():
            for metric in metrics:
                of = self._metrics.setdefault(metric.experiment, {})
                of[metric.algorithm, metric.step, metric.name] = metric

    async def metrics(self, experiment: str, *, name: str | None = None) -> list[Metric]:
        """See the contract."""
        with self._work():
            of = self._metrics.get(experiment, {})
            return [of[key] for key in sorted(of) if name in (None, key[2])]

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """See the contract."""
        with self._work() as tables:
            return engine.delete(tables, rollout_ids)

    async def close(self) -> None:
        """See the contract."""
        self._is_closed = True
        self._queue_bell.ring()
        self._feed_bell.ring()

    async def _until_found(self, look: Callable[[], list[_T]], bell: Bell, wait_s: float) -> list[_T]:
        """Look again whenever the bell rings or an attempt lapses, until something is found or the time is over."""
        end = time.monotonic() + wait_s
        while True:
            seen = bell.count
            found = look()
            left_s = end - time.monotonic()
            if found or left_s <= 0:
                return found
            await bell.wait(seen, min(left_s, self._tables.next_deadline() - self._clock()))

    @contextmanager
    def _work(self) -> Generator[MemoryTables]:
        """The tables under the lock, with overdue attempts decided; rings for what the work changed."""
        with self._lock:
            if self._is_closed:
                raise engine.closed(self.url)
            tables = self._tables
            cursor, tables.has_queued = tables.cursor, False
            try:
                engine.expire(tables, now=self._clock())
                yield tables
            finally:
                if tables.has_queued:
                    self._queue_bell.ring()
                if tables.cursor != cursor:
                    self._feed_bell.ring()


def _copies(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rules.copied(rollout) for rollout in rollouts]
