"""The price of running a query in a child process: the SQL reward's way to the database beside SQLite in this process.

Run alone: ``python -m benchmarks.bench_rewards``.
"""

import asyncio
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from agl.errors import PluginError
from agl.schemas import ModelCall, Rollout, Span
from benchmarks._harness import Figure, component, interleave, table

QUERY = "SELECT name FROM singer WHERE age < 30 ORDER BY name"
BAR_MS = 2.0


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where ``agl-rewards`` is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = database(Path(folder) / "singers.sqlite")
        try:
            reward = component("reward", "sql-executes", database=str(path))
        except PluginError:
            return []
        rollout, spans = Rollout(rollout_id="r", task={}), [answer(QUERY)]

        async def judge() -> float:
            return (await reward(rollout, spans)).value

        here = partial(asyncio.to_thread, bare, path)
        queries = 20 if quick else 300
        found = interleave({"child": lambda: repeated(judge, queries), "here": lambda: repeated(here, queries)})
    return [
        Figure(
            name="a query of the SQL rewards",
            value=1e3 * found["child"].wall_s,
            unit="ms",
            bar=BAR_MS,
            better="lower",
            baseline=1e3 * found["here"].wall_s,
            baseline_name="sqlite3 in a thread of this process, a connection for each query",
            cpu_us=1e6 * found["child"].cpu_s,
        )
    ]


def repeated(act: Callable[[], Awaitable[Any]], times: int) -> int:
    """Await ``act`` so often, one after the other."""

    async def work() -> None:
        for _ in range(times):
            assert await act()

    asyncio.run(work())
    return times


def answer(text: str) -> Span:
    """A model call that gave this text."""
    response = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    call = ModelCall(request_id="q", dialect="chat", model="m", request={"messages": []}, response=response)
    return Span(rollout_id="r", attempt_id="r.1", span_id="s", name="chat", call=call)


def database(path: Path) -> Path:
    """A table of a thousand singers."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE singer (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO singer VALUES (?, ?)", [(f"s{at}", at % 90) for at in range(1000)])
    return path


def bare(path: Path) -> list[tuple[str]]:
    """The rows, without any limit."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(QUERY).fetchall()


if __name__ == "__main__":
    print(table(run(quick=False)))
