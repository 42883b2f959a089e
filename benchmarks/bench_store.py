"""Speed and size of the core's stores, next to raw SQLite with the same bytes and to the memory store.

Run it with ``python -m benchmarks.bench_store [--spans 1000000] [--repeats 5]``. All SQLite figures are durable: every
acknowledged operation was committed with ``synchronous = FULL``.
"""

import argparse
import asyncio
import random
import sqlite3
import tempfile
import tracemalloc
from collections.abc import Callable, Coroutine
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from agl.contracts import Store
from agl.schemas import ModelCall, Outcome, Rollout, Span, decode, encode, pack_floats, pack_ids
from agl.stores import MemoryStore
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Case, Figure, Prepared, interleave, rate_figure, table

BATCH = 100
IN_FLIGHT = 4
ATTRIBUTES = {f"agl.bench.attribute_{at}": f"value {at}" for at in range(10)}
IDS_500 = pack_ids(range(70_000, 70_500))
IDS_100 = pack_ids(range(90_000, 90_100))
LOGPROBS_100 = pack_floats(-0.01 * at for at in range(100))

CLAIM_RAW = (
    "UPDATE queue SET status = 'running' WHERE id IN "
    "(SELECT id FROM queue WHERE status = 'queued' ORDER BY id LIMIT ?) RETURNING id"
)

COPY_ROLLOUT = (
    """WITH RECURSIVE n(at) AS (SELECT 2 UNION ALL SELECT at + 1 FROM n WHERE at < :rollouts)
    INSERT INTO rollouts SELECT at, printf('ro-copy%020x', at), experiment, mode, group_id, status, stage, attempts,
    at << 14 | 1, started_at, finished_at, data, failures, losses, created_at FROM n, rollouts WHERE seq = 1""",
    """INSERT INTO attempts SELECT attempt, a.status, a.claim_id, a.deadline, a.data FROM rollouts, attempts a
    WHERE seq > 1 AND a.id = (1 << 14 | 1)""",
    """INSERT INTO spans SELECT (attempt << 24) + (key & 0xffffff), span_id, s.data FROM rollouts CROSS JOIN spans s
    WHERE seq > 1 AND s.key >> 24 = (1 << 14 | 1)""",
)
VOCABULARY = ["".join(random.Random(at).choices("etaoinshrdlcumwfgypbvk", k=1 + at % 9)) for at in range(5000)]
WEIGHTS = [1 / (rank + 3) for rank in range(5000)]

LISTING_INDEXES = ("rollouts_created", "rollouts_finished")
"""The indexes that serve sorted lists of rollouts and retention."""

STAGES = ("enqueue", "claim", "finish")

T = TypeVar("T")
MakeSpan = Callable[[str, int], Span]

_fresh = count()


def small_span(rollout_id: str, number: int) -> Span:
    return Span(
        rollout_id=rollout_id,
        attempt_id=f"{rollout_id}.1",
        span_id=f"{number:016x}",
        trace_id="5" * 32,
        parent_id="7" * 16,
        name="execute_tool calculator",
        start_ns=1_700_000_000_000_000_000,
        end_ns=1_700_000_000_100_000_000,
        attributes=ATTRIBUTES,
    )


def llm_span(rollout_id: str, number: int) -> Span:
    """A model call with 700 packed values: 500 prompt ids, 100 response ids, 100 log-probabilities."""
    call = ModelCall(
        request_id=f"request-{number}",
        dialect="chat",
        model="main",
        model_version="7",
        request={"model": "main", "messages": [{"role": "user", "content": f"question {number}"}]},
        response={"choices": [{"message": {"role": "assistant", "content": f"answer {number}"}}]},
        prompt_ids=pack_first(number) + IDS_500[4:],
        response_ids=IDS_100,
        logprobs=LOGPROBS_100,
    )
    return Span(
        rollout_id=rollout_id, attempt_id=f"{rollout_id}.1", span_id=f"{number:016x}", name="chat main", call=call
    )


def pack_first(number: int) -> bytes:
    """One id that no other call's prompt begins with, so that nothing is shared."""
    return pack_ids([number + 1])


def text_call(prompt: int, response: int, seed: int) -> ModelCall:
    """A call with random ids and made-up text."""
    source = random.Random(seed)
    return ModelCall(
        request_id=f"request-{seed}",
        dialect="chat",
        model="main",
        request={"model": "main", "messages": [{"role": "user", "content": words(source, prompt)}]},
        response={"choices": [{"message": {"role": "assistant", "content": words(source, response)}}]},
        prompt_ids=pack_ids(source.randrange(150_000) for _ in range(prompt)),
        response_ids=pack_ids(source.randrange(150_000) for _ in range(response)),
        logprobs=pack_floats(-source.random() for _ in range(response)),
    )


def words(source: random.Random, tokens: int) -> str:
    """Text of 4.5 characters a token out of made-up words, frequent and rare ones as in English."""
    text = " ".join(source.choices(VOCABULARY, WEIGHTS, k=tokens))
    return text[: int(4.5 * tokens)]


def conversation(turns: int) -> tuple[list[ModelCall], int]:
    """The calls of one conversation of 200 new tokens a turn, and the bytes of its unique tokens and text."""
    ids, messages, calls, unique = b"", [], [], 0
    for turn in range(turns):
        fresh = text_call(100, 100, turn)
        question, answer = fresh.request["messages"][0], fresh.response["choices"][0]["message"]
        ids += fresh.prompt_ids
        messages.append(question)
        request = {"model": "main", "messages": list(messages)}
        calls.append(
            ModelCall(
                request_id=fresh.request_id,
                dialect="chat",
                model="main",
                request=request,
                response=fresh.response,
                prompt_ids=ids,
                response_ids=fresh.response_ids,
                logprobs=fresh.logprobs,
            )
        )
        ids += fresh.response_ids
        messages.append(answer)
        unique += 4 * 300 + len(question["content"]) + len(answer["content"])
    return calls, unique


async def start(store: Store, rollouts: int) -> list[str]:
    """Rollouts that run; returns their ids."""
    ids = [f"ro-{next(_fresh):024x}" for _ in range(rollouts)]
    await store.enqueue([Rollout(rollout_id=each, task={"question": "1 + 1"}) for each in ids])
    await store.claim(worker="bench", limit=rollouts, lease_s=3600)
    return ids


async def append_all(store: Store, batches: list[list[Span]]) -> None:
    """Append all batches, some in flight at once, as a gateway or several runners do."""
    waiting = iter(batches)

    async def worker() -> None:
        for batch in waiting:
            await store.append_spans(batch)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


class Bench:
    """The stores that are measured, and the loop that all cases run in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = asyncio.Runner()
        self.sqlite: Store = SQLiteStore(f"sqlite:///{folder}/runs.db")
        self.memory: Store = MemoryStore()

    def close(self) -> None:
        self.runner.run(self.sqlite.close())
        self.runner.close()

    def case(
        self, prepare: Callable[[], Coroutine[Any, Any, T]], act: Callable[[T], Coroutine[Any, Any, int]]
    ) -> Prepared:
        return Prepared(prepare=lambda: self.runner.run(prepare()), act=lambda value: self.runner.run(act(value)))

    def raw(self, name: str) -> sqlite3.Connection:
        """A bare connection with the durability of the store."""
        connection = sqlite3.connect(self.folder / name, isolation_level=None)
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection


def span_figure(bench: Bench, *, title: str, make: MakeSpan, bar: float, repeats: int) -> list[Figure]:
    """Appending batches of 100 spans, next to a bare executemany of the same bytes and to the memory store."""
    raw = bench.raw(f"raw-{make.__name__}.db")
    raw.execute("CREATE TABLE spans (key INTEGER PRIMARY KEY, span_id TEXT UNIQUE, data BLOB)")
    keys = count(1)

    def into(store: Store) -> Prepared:
        async def prepare() -> list[list[Span]]:
            return [[make(rollout_id, number) for number in range(BATCH)] for rollout_id in await start(store, 40)]

        async def act(batches: list[list[Span]]) -> int:
            await append_all(store, batches)
            return BATCH * len(batches)

        return bench.case(prepare, act)

    def write_raw(rows: list[tuple[int, str, bytes]]) -> int:
        for at in range(0, len(rows), BATCH):
            raw.execute("BEGIN IMMEDIATE")
            raw.executemany("INSERT INTO spans VALUES (?, ?, ?)", rows[at : at + BATCH])
            raw.execute("COMMIT")
        return len(rows)

    def raw_rows() -> list[tuple[int, str, bytes]]:
        data = encode(make("ro-0000", 1))
        return [(key, f"{key:016x}", data) for key in islice(keys, 40 * BATCH)]

    cases = {
        "raw": Prepared(prepare=raw_rows, act=write_raw),
        "memory": into(bench.memory),
        "sqlite": into(bench.sqlite),
    }
    samples = interleave(cases, repeats=repeats)
    raw.close()
    return [
        rate_figure(title, samples["sqlite"], bar=bar, baseline=samples["raw"], baseline_name="bare executemany, FULL"),
        rate_figure(
            f"{title}, memory://", samples["memory"], bar=None, baseline=samples["raw"], baseline_name="the same"
        ),
    ]


def claiming(bench: Bench, store: Store, *, limit: int, workers: int, total: int) -> Prepared:
    """Emptying a queue of ``total`` rollouts."""

    async def prepare() -> None:
        await store.enqueue([Rollout(rollout_id=f"ro-{next(_fresh):024x}", task={"n": at}) for at in range(total)])

    async def worker() -> int:
        claimed = 0
        while claims := await store.claim(worker="bench", limit=limit, lease_s=3600):
            claimed += len(claims)
        return claimed

    async def act(_: None) -> int:
        return sum(await asyncio.gather(*(worker() for _ in range(workers))))

    return bench.case(prepare, act)


def claiming_raw(raw: sqlite3.Connection, *, limit: int, total: int) -> Prepared:
    """The same with one bare statement for each claim."""

    def prepare() -> None:
        raw.execute("BEGIN")
        raw.executemany("INSERT INTO queue (status) VALUES (?)", [("queued",)] * total)
        raw.execute("COMMIT")

    def act(_: None) -> int:
        claimed = 0
        while rows := raw.execute(CLAIM_RAW, (limit,)).fetchall():
            claimed += len(rows)
        return claimed

    return Prepared(prepare=prepare, act=act)


def claim_figures(bench: Bench, *, repeats: int) -> list[Figure]:
    """Claims one at a time from one and from eight workers, and in batches of 500."""
    raw = bench.raw("raw-claims.db")
    raw.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY, status TEXT)")
    raw.execute("CREATE INDEX queued ON queue (id) WHERE status = 'queued'")
    cases = {
        "raw 1": claiming_raw(raw, limit=1, total=1000),
        "raw 500": claiming_raw(raw, limit=500, total=10_000),
        "one": claiming(bench, bench.sqlite, limit=1, workers=1, total=1000),
        "eight": claiming(bench, bench.sqlite, limit=1, workers=8, total=2000),
        "batch": claiming(bench, bench.sqlite, limit=500, workers=2, total=10_000),
        "memory": claiming(bench, bench.memory, limit=1, workers=1, total=2000),
    }
    found = interleave(cases, repeats=repeats)
    raw.close()

    def figure(name: str, key: str, bar: float | None, base: str) -> Figure:
        return rate_figure(
            name, found[key], bar=bar, baseline=found[base], baseline_name="bare UPDATE .. RETURNING, FULL"
        )

    return [
        figure("claims one at a time, 8 workers", "eight", 5000, "raw 1"),
        figure("claims one at a time, 1 worker", "one", None, "raw 1"),
        figure("claims in batches of 500", "batch", 100_000, "raw 500"),
        figure("claims one at a time, memory://", "memory", None, "raw 1"),
    ]


def going(bench: Bench, store: Store, stage: str, *, total: int, size: int = 500) -> Prepared:
    """Take rollouts through one stage in batches; the stages before it come first and do not count."""
    parts = [range(at, min(at + size, total)) for at in range(0, total, size)]

    async def enqueue(_: object) -> int:
        for part in parts:
            await store.enqueue([Rollout(rollout_id=f"ro-{next(_fresh):024x}", task={"n": at}) for at in part])
        return total

    async def claim(_: object) -> int:
        return sum([len(await store.claim(worker="bench", limit=size, lease_s=3600)) for _ in parts])

    async def finish(ids: list[str]) -> int:
        for at in range(0, total, size):
            await store.finish([Outcome(attempt_id=each, status="succeeded") for each in ids[at : at + size]])
        return total

    async def prepare() -> list[str]:
        if stage == "enqueue":
            return []
        await enqueue(None)
        if stage == "claim":
            return []
        claims = [claim for _ in parts for claim in await store.claim(worker="bench", limit=size, lease_s=3600)]
        return [claim.attempt.attempt_id for claim in claims]

    return bench.case(prepare, {"enqueue": enqueue, "claim": claim, "finish": finish}[stage])


def index_figures(
    bench: Bench, name: str, *, indexed: Store, bare: Store, repeats: int, total: int = 5000
) -> list[Figure]:
    """Rollouts queued, claimed and finished, next to the same in a store without the indexes for sorted lists."""
    found: list[Figure] = []
    for stage in STAGES:
        cases = {key: going(bench, store, stage, total=total) for key, store in (("with", indexed), ("bare", bare))}
        samples = interleave(cases, repeats=repeats)
        for store in (indexed, bare):
            bench.runner.run(emptied(store))
        title, base = f"rollouts through {stage}, {name}", "the same without the indexes of sorted lists"
        found.append(rate_figure(title, samples["with"], bar=None, baseline=samples["bare"], baseline_name=base))
    return found


async def emptied(store: Store) -> None:
    """Finish what earlier cases left in the queue."""
    while claims := await store.claim(worker="bench", limit=500, lease_s=3600):
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded") for claim in claims])


def without_listing_indexes(bench: Bench) -> Store:
    """A second SQLite store, without the indexes for sorted lists."""
    path = bench.folder / "unindexed.db"
    bench.runner.run(SQLiteStore(f"sqlite:///{path}").close())
    raw = sqlite3.connect(path)
    for index in LISTING_INDEXES:
        raw.execute(f"DROP INDEX {index}")
    raw.close()
    return SQLiteStore(f"sqlite:///{path}")


def sqlite_index_figures(bench: Bench, *, repeats: int) -> list[Figure]:
    """Measure how much slower the SQLite store writes with its indexes for sorted lists than without them."""
    indexed, bare = SQLiteStore(f"sqlite:///{bench.folder}/indexed.db"), without_listing_indexes(bench)
    found = index_figures(bench, "SQLite", indexed=indexed, bare=bare, repeats=repeats)
    for store in (indexed, bare):
        bench.runner.run(store.close())
    return found


def read_figure(bench: Bench, *, spans: int, repeats: int) -> Figure:
    """One rollout of 20 spans, 4 of them model calls, out of a big store, next to one out of a small store."""
    big = bench.runner.run(filled(bench.folder / "big.db", spans))
    small = bench.runner.run(filled(bench.folder / "small.db", 20_000))

    def reading(store: Store, ids: list[str]) -> Case:
        async def read() -> int:
            sample = random.Random(1).choices(ids, k=50)
            for rollout_id in sample:
                assert len(await store.spans(rollout_id)) == 20
            return len(sample)

        return lambda: bench.runner.run(read())

    samples = interleave({"big": reading(*big), "small": reading(*small)}, repeats=repeats)
    for store, _ in (big, small):
        bench.runner.run(store.close())
    return Figure(
        name=f"one rollout of 20 spans out of {spans:,}",
        value=samples["big"].wall_s * 1e3,
        unit="ms",
        bar=2.0,
        better="lower",
        baseline=samples["small"].wall_s * 1e3,
        baseline_name="the same out of 20,000 spans",
        cpu_us=samples["big"].cpu_s * 1e6,
    )


async def filled(path: Path, spans: int) -> tuple[Store, list[str]]:
    """A store with rollouts of 20 spans each, 4 of them model calls, made by copying one inside SQLite."""
    store: Store = SQLiteStore(f"sqlite:///{path}")
    (first,) = await start(store, 1)
    await store.append_spans([(small_span, llm_span)[at % 5 == 0](first, at) for at in range(20)])
    await store.close()
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA synchronous = OFF")
    for statement in COPY_ROLLOUT:
        raw.execute(statement, {"rollouts": spans // 20})
        raw.commit()
    ids = [each for (each,) in raw.execute("SELECT rollout_id FROM rollouts WHERE seq % 97 = 0 LIMIT 500")]
    raw.close()
    return SQLiteStore(f"sqlite:///{path}"), ids


def size_figures(bench: Bench) -> list[Figure]:
    """Bytes of a call of 1,200 tokens, five in a rollout that share nothing, and of a conversation of 50 turns."""
    calls = [[text_call(1000, 200, 5 * at + each) for each in range(5)] for at in range(60)]
    plain = sum(len(encode(call)) for call in calls[0]) / 5
    on_disk = bench.runner.run(disk_bytes(bench.folder / "calls.db", calls)) / 300
    tracemalloc.start()
    memory = bench.runner.run(memory_bytes(calls)) / 300
    tracemalloc.stop()
    turns, unique = conversation(50)
    chat = bench.runner.run(disk_bytes(bench.folder / "chat.db", [turns] * 10)) / 10
    whole = sum(len(encode(call)) for call in turns)
    return [
        size_figure("a call of 1,200 tokens on disk", on_disk, "bytes", 10_000, plain, "msgpack of the call"),
        size_figure("a call of 1,200 tokens in memory", memory, "bytes", 8192, plain, "msgpack of the call"),
        size_figure("50 turns on disk", chat / unique, "x unique", 2.0, whole / unique, "msgpack of every call"),
    ]


def size_figure(name: str, value: float, unit: str, bar: float, baseline: float, baseline_name: str) -> Figure:
    return Figure(
        name=name, value=value, unit=unit, bar=bar, better="lower", baseline=baseline, baseline_name=baseline_name
    )


async def fill(store: Store, attempts: list[list[ModelCall]]) -> None:
    for rollout_id, calls in zip(await start(store, len(attempts)), attempts, strict=True):
        for at, call in enumerate(calls):
            span_id = f"{at:016x}"
            span = Span(rollout_id=rollout_id, attempt_id=f"{rollout_id}.1", span_id=span_id, name="chat", call=call)
            await store.append_spans([span])


async def disk_bytes(path: Path, attempts: list[list[ModelCall]]) -> int:
    """The size of the file with these calls, one list for each attempt."""
    store = SQLiteStore(f"sqlite:///{path}")
    await fill(store, attempts)
    await store.close()
    return path.stat().st_size


async def memory_bytes(attempts: list[list[ModelCall]]) -> int:
    """The memory store's bytes for copies of these calls that nobody else holds."""
    before = tracemalloc.get_traced_memory()[0]
    store = MemoryStore()
    for calls in attempts:
        await fill(store, [[decode(encode(call), ModelCall) for call in calls]])
    return tracemalloc.get_traced_memory()[0] - before


def figures(*, spans: int = 1_000_000, repeats: int = 5) -> list[Figure]:
    """All figures of the stores."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        small = span_figure(bench, title="spans of 10 attributes", make=small_span, bar=60_000, repeats=repeats)
        llm = span_figure(bench, title="spans of 700 packed values", make=llm_span, bar=15_000, repeats=repeats)
        claims = claim_figures(bench, repeats=repeats)
        indexes = sqlite_index_figures(bench, repeats=repeats)
        sizes = size_figures(bench)
        read = read_figure(bench, spans=spans, repeats=repeats)
        bench.close()
    return [*small, *llm, *claims, *indexes, read, *sizes]


def run(*, quick: bool) -> list[Figure]:
    """Every figure; quickly from a smaller store."""
    return figures(spans=100_000 if quick else 1_000_000, repeats=1 if quick else 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=1_000_000, help="size of the store that one rollout is read from")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(table(figures(spans=arguments.spans, repeats=arguments.repeats)))


if __name__ == "__main__":
    main()
