"""A trainer's process with its gateway inside, and with the gateway in a process of its own; and what rows cost.

``python -m benchmarks.bench_apart inside|apart BACKEND STORE_URL TOKENS_FILE SPOOL`` is such a trainer. Its event loop
only sleeps for 5 ms again and again, and says how late it woke. For a line ``busy`` on standard input it also builds
rows of recorded rollouts without a pause in a thread, as a trainer does between collecting and updating; for ``idle``
it does not. Each line begins a measurement, and ``end`` ends it, once every call is in the store.

The load is the same for both: calls that start at fixed times, so that a late answer counts as latency.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from agl.contracts import Gateway, RolloutQuery, Store, Upstream
from agl.episodes import build_episode
from agl.schemas import Claim, ModelCall, Outcome, Rollout, Span, new_rollout_id, new_span_id, pack_floats, pack_ids
from agl.stores import read_recordings
from agl_run.access import AttemptTokens
from benchmarks._harness import Figure, component, table
from benchmarks._served import SECRET
from benchmarks.bench_gateway import CONNECTIONS, Run, Server, load, started

RATE = 100.0
SECONDS = 10
REPEATS = 3
PLACES = ("inside", "apart")
NAP_S = 0.005
ROLLOUTS, CALLS, TOKENS = 50, 10, 2_000
"""Rollouts whose rows are built, their calls, and the tokens of each call."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a trainer's figures of one measurement: CPU seconds of both processes, and how late it woke."""

    cpu_s: float
    gateway_cpu_s: float
    late_p99_s: float
    rows: int


class Trainer:
    """A trainer's process with a gateway, as seen from within."""

    def __init__(self, gateway: Gateway, claims: list[Claim]) -> None:
        self._gateway = gateway
        self._claims = claims
        self._late: list[float] = []
        self._rows = 0
        self._is_busy = threading.Event()
        self._began = (0.0, 0.0)

    async def run(self) -> None:
        """Follow the lines on standard input until there are no more."""
        threading.Thread(target=self._build_rows, daemon=True).start()
        sleeping = asyncio.create_task(self._sleep())
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if word == "end":
                self._is_busy.clear()
                for claim in self._claims:
                    await self._gateway.settle(claim.attempt.attempt_id)
                print(msgspec.json.encode(self._measured()).decode(), flush=True)
            else:
                self._late, self._rows, self._began = [], 0, (time.process_time(), self._gateway_cpu_s())
                (self._is_busy.set if word == "busy" else self._is_busy.clear)()
                print("begun", flush=True)
        sleeping.cancel()

    def _measured(self) -> Measured:
        late = sorted(self._late) or [0.0]
        return Measured(
            cpu_s=time.process_time() - self._began[0],
            gateway_cpu_s=self._gateway_cpu_s() - self._began[1],
            late_p99_s=late[len(late) * 99 // 100],
            rows=self._rows,
        )

    def _gateway_cpu_s(self) -> float:
        """CPU seconds of the gateway's own process, 0 where it has none."""
        pid = getattr(self._gateway, "pid", 0)
        if not pid:
            return 0.0
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")

    async def _sleep(self) -> None:
        while True:
            due = time.perf_counter() + NAP_S
            await asyncio.sleep(NAP_S)
            self._late.append(time.perf_counter() - due)

    def _build_rows(self) -> None:
        rollout, attempt = self._claims[0].rollout, self._claims[0].attempt
        spans = spans_of(rollout.rollout_id, attempt.attempt_id, random.Random(0))
        while self._is_busy.wait():
            self._rows += len(build_episode(rollout, attempt, spans).rows)


def spans_of(rollout_id: str, attempt_id: str, draw: random.Random) -> list[Span]:
    """Calls that share nothing, so that each becomes a row: what costs most."""
    spans: list[Span] = []
    for _ in range(CALLS):
        prompt, response = (draw.choices(range(30_000), k=count) for count in (TOKENS - 200, 200))
        call = ModelCall(
            request_id=new_span_id(),
            dialect="chat",
            model="canned",
            request={"messages": [{"role": "user", "content": "x" * 4 * len(prompt)}]},
            response={"choices": [{"message": {"role": "assistant", "content": "y" * 800}}]},
            prompt_ids=pack_ids(prompt),
            response_ids=pack_ids(response),
            logprobs=pack_floats([-0.5] * len(response)),
        )
        spans.append(
            Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="chat canned", call=call)
        )
    return spans


async def serve(place: str, backend: str, store_url: str, tokens_file: str, spool: str) -> None:
    """Be a trainer until the parent closes standard input."""
    store: Store = component("store", store_url.partition(":")[0], url=store_url)
    tokens = AttemptTokens(SECRET)
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=n) for n in range(CONNECTIONS)])
    claims = await store.claim(worker="bench", limit=CONNECTIONS, lease_s=3600)
    until = time.time() + 3600
    issued = [tokens.issue(c.attempt.rollout_id, c.attempt.attempt_id, expires_at=until) for c in claims]
    Path(tokens_file).write_text("\n".join(issued), encoding="utf-8")
    inside = component("gateway", "gateway", spool=spool if place == "apart" else "")
    gateway: Gateway = inside.apart(store_url, plugins={}) if place == "apart" else inside
    one = Upstream(name="canned", base_url=backend, is_trained=True)
    print(await gateway.start(store=store, upstreams=[one], secret=SECRET), flush=True)
    try:
        await Trainer(gateway, claims).run()
    finally:
        await gateway.stop()


def measured(server: Server, tokens: Path, *, is_busy: bool, seconds: int) -> tuple[Run, Measured]:
    """One load on one trainer, as its clients and as itself saw it."""
    assert server.process.stdin is not None
    assert server.process.stdout is not None

    def say(word: str) -> str:
        print(word, file=server.process.stdin, flush=True)
        return server.process.stdout.readline()  # type: ignore[union-attr]

    say("busy" if is_busy else "idle")
    run = load(f"{server.url}/v1", tokens, calls=int(RATE * seconds), rate=RATE)
    return run, msgspec.json.decode(say("end"), type=Measured)


async def row_cpu_s() -> tuple[float, float]:
    """CPU seconds of a rollout's rows: reading its spans from a SQLite file, and building the rows."""
    with tempfile.TemporaryDirectory() as folder:
        store: Store = component("store", "sqlite", url=f"sqlite:///{folder}/runs.db")
        await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=n) for n in range(ROLLOUTS)])
        claims, draw = await store.claim(worker="bench", limit=ROLLOUTS, lease_s=3600), random.Random(0)
        for claim in claims:
            await store.append_spans(spans_of(claim.rollout.rollout_id, claim.attempt.attempt_id, draw))
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
        query = RolloutQuery(ids=tuple(claim.rollout.rollout_id for claim in claims), limit=ROLLOUTS)
        began = time.process_time()
        found = [each async for each in read_recordings(store, query, spans="deciding")]
        read = time.process_time()
        for each in found:
            build_episode(each.rollout, each.attempts[0], each.spans)
        built = time.process_time()
        await store.close()
    return (read - began) / ROLLOUTS, (built - read) / ROLLOUTS


def figures(*, seconds: int = SECONDS, repeats: int = REPEATS) -> list[Figure]:
    """Measure everything."""
    found: dict[tuple[str, bool], list[tuple[Run, Measured]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backend = stack.enter_context(started("benchmarks.canned", "64")).url
        servers: dict[str, tuple[Server, Path]] = {}
        for place in PLACES:
            tokens = folder / f"tokens-{place}"
            own = [f"sqlite:///{folder}/{place}.db", str(tokens), str(folder / "spool")]
            servers[place] = stack.enter_context(started("benchmarks.bench_apart", place, backend, *own)), tokens
        for _ in range(repeats):
            for is_busy in (False, True):
                for place, (server, tokens) in servers.items():
                    one = measured(server, tokens, is_busy=is_busy, seconds=seconds)
                    found.setdefault((place, is_busy), []).append(one)
    return [*_calls(found), *_rows(found)]


def _calls(found: dict[tuple[str, bool], list[tuple[Run, Measured]]]) -> list[Figure]:
    """The trainer's CPU per call, its lateness, and its calls' latency, apart beside inside."""

    def median(place: str, is_busy: bool, name: str) -> float:
        runs = found[place, is_busy]
        values = {
            "cpu": [own.cpu_s / (run.calls + CONNECTIONS) for run, own in runs],
            "both": [(own.cpu_s + own.gateway_cpu_s) / (run.calls + CONNECTIONS) for run, own in runs],
            "late": [own.late_p99_s for _, own in runs],
            "p99": [run.p99 for run, _ in runs],
            "p50": [run.p50 for run, _ in runs],
            "rows": [own.rows / run.wall_s for run, own in runs],
        }
        return statistics.median(values[name])

    at = f"at {RATE:.0f} calls/s"
    titles = (
        (f"CPU of the trainer's process per call, {at}", "cpu", False),
        (f"CPU of trainer and gateway per call, {at}", "both", False),
        (f"lateness of the trainer's event loop, p99, {at}", "late", False),
        ("the same while the trainer builds rows", "late", True),
        (f"latency of a call, p50, while the trainer builds rows, {at}", "p50", True),
        (f"latency of a call, p99, while the trainer builds rows, {at}", "p99", True),
    )
    shown = [
        Figure(
            name=f"gateway apart: {title}",
            value=1e3 * median("apart", is_busy, name),
            unit="ms",
            better="lower",
            baseline=1e3 * median("inside", is_busy, name),
            baseline_name="gateway inside",
        )
        for title, name, is_busy in titles
    ]
    rows = Figure(
        name=f"gateway apart: rows that the trainer builds, {at}",
        value=median("apart", True, "rows"),
        unit="/s",
        baseline=median("inside", True, "rows"),
        baseline_name="gateway inside",
    )
    return [*shown, rows]


def _rows(found: dict[tuple[str, bool], list[tuple[Run, Measured]]]) -> list[Figure]:
    """The CPU of a rollout's rows, beside that of the gateway for the rollout's calls."""
    costs = [asyncio.run(row_cpu_s()) for _ in found["inside", False]]
    calls = [CALLS * own.cpu_s / (run.calls + CONNECTIONS) for run, own in found["inside", False]]
    names = ("reading the spans", "building the rows")
    return [
        Figure(
            name=f"CPU of a rollout of {CALLS} calls of {TOKENS:,} tokens: {name}",
            value=1e3 * statistics.median(cost[part] for cost in costs),
            unit="ms",
            better="lower",
            baseline=1e3 * statistics.median(calls),
            baseline_name=f"its {CALLS} calls through the gateway, of 1,200 tokens",
        )
        for part, name in enumerate(names)
    ]


def run(*, quick: bool) -> list[Figure]:
    """Every figure; quickly with fewer calls."""
    return figures(seconds=2, repeats=1) if quick else figures()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(*sys.argv[1:]))
    else:
        print(table(run(quick=False)))
