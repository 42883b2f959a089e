"""Whole rollouts through ``Trainer`` into a durable SQLite file: without a model call, with one, and the wake-up.

Each measured run is a process of its own that runs an experiment from start to end: enqueue, claim, run the agent,
write its spans and its outcome, read everything back, build the episodes. The second agent makes one model call over
a raw keep-alive connection to the gateway, which runs within that process as under ``agl run`` and calls a canned
server in another process; a raw client because an ``openai`` client alone costs more CPU than the bar allows.

``python -m benchmarks.bench_run CASE COUNT [URL]`` runs one case and prints its measurement as JSON.
"""

import asyncio
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import agl
from agl.schemas import LLM, Rollout, new_rollout_id, to_json
from agl_run import AgentSpec, AsyncRunner, Quiet, RunContext, Worker
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure, table
from benchmarks._load import Connection, make_request

CONCURRENCY = 32
STEPS = ("plan", "search", "read", "compare", "answer")
SECRET = b"a secret of the benchmarks alone"
BODY = to_json({"model": "canned", "messages": [{"role": "user", "content": "what is 6 times 7?"}]})


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run: seconds of wall time and of this process's CPU, per rollout."""

    wall_s: float
    cpu_s: float


async def spans_agent(task: dict[str, Any]) -> float:
    """Five spans with two attributes each, and a reward."""
    for name in STEPS:
        with agl.operation(name, question=task["question"], step=name):
            pass
    return 1.0


class Pool:
    """Keep-alive connections to one server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free: list[Connection] = []

    async def call(self, token: str) -> None:
        """One chat completion, read to its end."""
        connection = self._free.pop() if self._free else Connection(self._url)
        if not hasattr(connection, "_reader"):
            await connection.open()
        await connection.call(make_request(self._url, token, BODY))
        self._free.append(connection)

    def close(self) -> None:
        """Close what is open."""
        for connection in self._free:
            connection.close()


def calling_agent(pools: dict[str, Pool]) -> Callable[[dict[str, Any], LLM], Awaitable[float]]:
    """An agent with five spans, one model call and a reward."""

    async def agent(task: dict[str, Any], llm: LLM) -> float:
        pool = pools.setdefault(llm.endpoint, Pool(llm.endpoint))
        with agl.operation("call"):
            await pool.call(llm.api_key)
        return await spans_agent(task)

    return agent


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"question": f"what is {number} times 7?"} for number in range(count)]


def fit(folder: Path, count: int) -> Measured:
    """``count`` rollouts without a model call."""
    return fitted(folder, count, agent=spans_agent)


def fit_one(folder: Path, count: int) -> Measured:
    """The same, one after the other."""
    return fitted(folder, count, agent=spans_agent, n_runners=1)


def fit_calls(folder: Path, count: int, url: str) -> Measured:
    """``count`` rollouts with one model call each through the gateway."""
    llm = {"main": LLM(endpoint=url, model="canned")}
    return fitted(folder, count, agent=calling_agent({}), initial_resources=llm, gateway="gateway")


def fitted(folder: Path, count: int, *, agent: Callable[..., Any], **settings: Any) -> Measured:
    """A whole experiment of ``count`` rollouts, after one of a few that imports what is needed."""

    def work(name: str, count: int) -> None:
        store = f"sqlite:///{folder}/{name}.db"
        trainer = agl.Trainer(
            store=store, name=name, folder=folder, progress=Quiet(), **{"n_runners": CONCURRENCY, **settings}
        )
        result = trainer.fit(agent, val_dataset=tasks(count))
        if result.before != 1.0:
            raise RuntimeError(f"rollouts failed: {result}")

    work("warm", CONCURRENCY)
    return timed(count, lambda: work("measured", count))


def timed(count: int, work: Callable[[], object]) -> Measured:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Measured(wall_s=(time.perf_counter() - wall) / count, cpu_s=(time.process_time() - cpu) / count)


def raw_inserts(folder: Path, count: int) -> Measured:
    """The agent's coroutine by itself, then one row a span and one a rollout, 32 rollouts in a durable commit."""
    db = sqlite3.connect(folder / "raw.db", isolation_level=None)
    db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
    db.executescript("CREATE TABLE spans (id INTEGER PRIMARY KEY, data BLOB); CREATE TABLE rollouts (task, reward);")

    async def work() -> None:
        waiting = tasks(count)
        for first in range(0, count, CONCURRENCY):
            batch = waiting[first : first + CONCURRENCY]
            rewards = await asyncio.gather(*(spans_agent(task) for task in batch))
            db.execute("BEGIN IMMEDIATE")
            for task, reward in zip(batch, rewards, strict=True):
                rows = [(to_json({"name": name, "question": task["question"], "step": name}),) for name in STEPS]
                db.executemany("INSERT INTO spans (data) VALUES (?)", rows)
                db.execute("INSERT INTO rollouts VALUES (?, ?)", (to_json(task), reward))
            db.execute("COMMIT")

    measured = timed(count, lambda: asyncio.run(work()))
    db.close()
    return measured


def direct_calls(_: Path, count: int, url: str) -> Measured:
    """The agent's model calls straight to the backend, as many at once, nothing recorded."""

    async def work() -> None:
        pool = Pool(url)
        left = iter(range(count))

        async def caller() -> None:
            for _ in left:
                await pool.call("none")

        await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))
        pool.close()

    return timed(count, lambda: asyncio.run(work()))


def wake_up(folder: Path, count: int) -> Measured:
    """Median seconds from before ``enqueue`` to the agent's first line, one rollout at a time, the runner idle."""
    started: asyncio.Queue[float] = asyncio.Queue()

    async def agent(task: Any) -> None:
        started.put_nowait(time.perf_counter())

    async def no_resources(_: Rollout) -> dict[str, Any]:
        return {}

    async def work() -> list[float]:
        store = SQLiteStore(f"sqlite:///{folder}/wake.db")
        setup = RunContext(agent=AgentSpec.of(agent), store=store, secret=SECRET, resources=no_resources)
        waits: list[float] = []
        async with Worker(setup, AsyncRunner(setup)):
            for number in range(count):
                await asyncio.sleep(0.02)
                begin = time.perf_counter()
                await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=number)])
                waits.append(await started.get() - begin)
        await store.close()
        return waits

    cpu = time.process_time()
    return Measured(wall_s=statistics.median(asyncio.run(work())), cpu_s=(time.process_time() - cpu) / count)


def event_wake_up(_: Path, count: int) -> Measured:
    """Median seconds from ``Event.set`` to the first line of the task that waits for it."""

    async def work() -> list[float]:
        waits: list[float] = []
        for _ in range(count):
            event = asyncio.Event()
            waiting = asyncio.create_task(_first_line(event))
            await asyncio.sleep(0.002)
            begin = time.perf_counter()
            event.set()
            waits.append(await waiting - begin)
        return waits

    cpu = time.process_time()
    return Measured(wall_s=statistics.median(asyncio.run(work())), cpu_s=(time.process_time() - cpu) / count)


async def _first_line(event: asyncio.Event) -> float:
    await event.wait()
    return time.perf_counter()


CASES: dict[str, Callable[..., Measured]] = {
    "fit": fit,
    "fit-one": fit_one,
    "fit-calls": fit_calls,
    "raw-inserts": raw_inserts,
    "direct-calls": direct_calls,
    "wake-up": wake_up,
    "event-wake-up": event_wake_up,
}


def measure(case: str, count: int, *arguments: str) -> Measured:
    """Run one case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_run", case, str(count), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


@contextmanager
def canned_server() -> Iterator[str]:
    """A server that answers every call with 200 tokens of a prompt of 1,000, in a process of its own; gives its URL."""
    command = [sys.executable, "-m", "benchmarks.canned"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def compare(
    first: tuple[str, ...], second: tuple[str, ...], *, counts: tuple[int, int], repeats: int
) -> tuple[Measured, Measured]:
    """Medians of two cases, run in turn."""
    runs = [
        (measure(first[0], counts[0], *first[1:]), measure(second[0], counts[1], *second[1:])) for _ in range(repeats)
    ]
    return _median([pair[0] for pair in runs]), _median([pair[1] for pair in runs])


def _median(runs: Sequence[Measured]) -> Measured:
    return Measured(
        wall_s=statistics.median(run.wall_s for run in runs), cpu_s=statistics.median(run.cpu_s for run in runs)
    )


def run(*, quick: bool) -> list[Figure]:
    """The three figures of whole rollouts."""
    repeats, count = (1, 1000) if quick else (3, 3000)
    plain = compare(("fit",), ("raw-inserts",), counts=(count, count), repeats=repeats)
    one = compare(("fit-one",), ("raw-inserts",), counts=(count // 3, count), repeats=repeats)
    with canned_server() as url:
        calls = compare(("fit-calls", url), ("direct-calls", url), counts=(count // 2, count), repeats=repeats)
    wakes = compare(("wake-up",), ("event-wake-up",), counts=(50, 50), repeats=repeats)
    return [
        _rate("rollouts with 5 spans", *plain, bar=2000, baseline_name="bare agent, raw SQLite inserts"),
        _rate("the same, one after the other", *one, bar=800, baseline_name="the same"),
        _rate("rollouts with a gateway call", *calls, bar=400, baseline_name="the call alone, to the backend"),
        Figure(
            name="enqueue to the agent's first line",
            value=wakes[0].wall_s * 1e3,
            unit="ms",
            bar=20.0,
            better="lower",
            baseline=wakes[1].wall_s * 1e3,
            baseline_name="asyncio.Event wake-up",
            cpu_us=wakes[0].cpu_s * 1e6,
        ),
    ]


def _rate(name: str, measured: Measured, baseline: Measured, *, bar: float, baseline_name: str) -> Figure:
    return Figure(
        name=name,
        value=1 / measured.wall_s,
        unit="/s",
        bar=bar,
        baseline=1 / baseline.wall_s,
        baseline_name=baseline_name,
        cpu_us=measured.cpu_s * 1e6,
    )


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        print(table(run(quick=False)))
        return
    case, count, *rest = arguments
    with tempfile.TemporaryDirectory() as folder:
        print(msgspec.json.encode(CASES[case](Path(folder), int(count), *rest)).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
