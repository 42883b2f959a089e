"""Calls through ``agl serve`` with ``agl learn`` next to it; its own cost after 50,000 conversations.

Gateway, learner, model and customers are processes of their own, over one SQLite store. Without a learner, with one
that only counts conversations, and with one that trains and replays all the time, customers call in turn; the latencies
of the turns of one round are compared. The learner's models are elsewhere in practice, so they run at the lowest
priority here.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agl.contracts import Store
from agl.schemas import ModelCall, Outcome, Reward, Rollout, Span, new_span_id
from agl_inspect.records.learning import LearningRecords
from agl_inspect.terminal.query import CONVERSATIONS
from benchmarks._desk import CONVERSATIONS_EACH, write_experiment
from benchmarks._harness import Figure, component, table
from benchmarks._processes import tree_cpu_s

TOKEN = "a client token of the benchmarks alone"
RATE = 40.0
WARM_S, TURN_S = 2, 12
ROUNDS = 5
TRAINS = "agl learn that trains and replays"
CASES = {"no learner": 0, "agl learn that only counts": 1_000_000_000, TRAINS: 40}
"""After how many conversations the learner of each case learns."""


class Program:
    """A running program, whose lines are kept."""

    def __init__(self, *words: str, cwd: Path | None = None) -> None:
        tokens = {"AGL_TOKEN": f"admin {TOKEN}", "AGL_CLIENT_TOKEN": TOKEN}
        paths = {"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONUNBUFFERED": "1"}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            words, cwd=cwd, env={**os.environ, **tokens, **paths}, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def line_with(self, text: str) -> str:
        """Wait for the first line with a text."""
        while True:
            found = next((line for line in list(self.lines) if text in line), "")
            if found:
                return found
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended without {text!r}: {self.lines}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it, and wait for its end."""
        self.process.terminate()
        self.process.wait()
        self._reader.join()


@contextmanager
def running(*words: str, cwd: Path | None = None) -> Generator[Program]:
    """Run a program until the end of the block."""
    program = Program(*words, cwd=cwd)
    try:
        yield program
    finally:
        program.stop()


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the customers.

    Attributes:
        p50: Median latency of a call in seconds.
        p99: The latency that 99 of 100 calls keep, in seconds.
        cpu: The share of a core that the learner and its training took.
        lines: What the learner said.
    """

    p50: float
    p99: float
    cpu: float = 0.0
    lines: list[str]


class Bench:
    """A gateway over a SQLite store, and the learner of each case in turn."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        served = stack.enter_context(running(sys.executable, "-m", "benchmarks._desk", "models"))
        apart = stack.enter_context(running("nice", "-n", "19", sys.executable, "-m", "benchmarks._desk", "models"))
        self._models = apart.line_with("http")
        upstream = ("--upstream", f"model={served.line_with('http')}")
        serve = (sys.executable, "-m", "agl", "serve", "--store", "sqlite:///runs.db", "--port", "0", *upstream)
        gateway = stack.enter_context(running(*serve, cwd=folder))
        self._url = next(word for word in gateway.line_with("http").split() if word.startswith("http"))
        self._seed = 0

    def turn(self, every: int, *, turn_s: float) -> Turn:
        """Let customers call; ``every`` is 0 without a learner."""
        if not every:
            return self._call(turn_s, None)
        write_experiment(self._folder, models=self._models, every=every, settle="2s")
        with running(sys.executable, "-m", "agl", "learn", "desk.toml", cwd=self._folder) as learner:
            learner.line_with("learning as")
            return self._call(turn_s, learner)

    def _call(self, turn_s: float, learner: Program | None) -> Turn:
        self._seed += 1
        skipped, count = int(WARM_S * RATE), int((WARM_S + turn_s) * RATE)
        before, started = tree_cpu_s(learner.process.pid) if learner else 0.0, time.perf_counter()
        words = (sys.executable, "-m", "benchmarks._desk", "customers", self._url, TOKEN, str(count), str(RATE))
        done = subprocess.run([*words, str(self._seed)], stdout=subprocess.PIPE, check=True)
        used = tree_cpu_s(learner.process.pid) - before if learner else 0.0
        latencies = sorted(msgspec.json.decode(done.stdout, type=list[float])[skipped:])
        return Turn(
            p50=latencies[len(latencies) // 2],
            p99=latencies[len(latencies) * 99 // 100],
            cpu=used / (time.perf_counter() - started),
            lines=list(learner.lines) if learner else [],
        )


def served(*, rounds: int, turn_s: float) -> dict[str, list[Turn]]:
    """Play the turns of all cases."""
    found: dict[str, list[Turn]] = {name: [] for name in CASES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(stack, folder)
        bench.turn(0, turn_s=turn_s)
        for _ in range(rounds):
            for name, every in CASES.items():
                found[name].append(bench.turn(every, turn_s=turn_s))
    return found


RECORDED = 50_000
IDLE_S = 20


async def record(store: Store, count: int) -> None:
    """Record conversations of the last two days, each with a call and a thumb."""
    begun, each_s = time.time() - 2 * 86_400, 86_400 / count
    for first in range(0, count, 500):
        numbers = range(first, min(first + 500, count))
        rollouts = [
            Rollout(
                rollout_id=f"conversation-{number:08d}",
                task={},
                experiment=CONVERSATIONS,
                metadata={"user": f"u{number // CONVERSATIONS_EACH}"},
                resources={"prompt": "desk-prompt-initial"},
                created_at=begun + number * each_s,
            )
            for number in numbers
        ]
        await store.enqueue(rollouts)
        claims = await store.claim(worker="gateway", limit=500, lease_s=1e9, experiment=CONVERSATIONS)
        await store.append_spans([_rated_call(rollout) for rollout in rollouts])
        await store.finish([Outcome(attempt_id=each.attempt.attempt_id, status="succeeded") for each in claims])


def _rated_call(rollout: Rollout) -> Span:
    moment = int(rollout.created_at * 1e9)
    request = {"messages": [{"role": "user", "content": f"A question of {rollout.rollout_id}. " * 10}]}
    response = {"choices": [{"message": {"role": "assistant", "content": "It is so. " * 40}}]}
    return Span(
        rollout_id=rollout.rollout_id,
        attempt_id=f"{rollout.rollout_id}.1",
        span_id=new_span_id(),
        name="chat model",
        start_ns=moment,
        end_ns=moment,
        call=ModelCall(
            request_id=rollout.rollout_id, dialect="chat", model="model", request=request, response=response
        ),
        reward=Reward(value=float(moment % 5 > 1), source="human"),
    )


async def _read_all(store: Store, last: str) -> None:
    """Wait until the learner has counted the last conversation."""
    records = LearningRecords("desk")
    while (state := await records.state.get(store)) is None or state.after != last:
        await asyncio.sleep(0.05)


async def recorded(folder: Path, *, count: int) -> list[Figure]:
    """The speed of a learner's first look at recorded conversations, and its processor time afterwards."""
    store: Store = component("store", "sqlite", url=f"sqlite:///{folder}/runs.db")
    await record(store, count)
    write_experiment(folder, models="http://127.0.0.1:9/v1", every=10 * count, settle="5m")
    with running(sys.executable, "-m", "agl", "learn", "desk.toml", cwd=folder) as learner:
        learner.line_with("learning as")
        started = time.perf_counter()
        await _read_all(store, f"conversation-{count - 1:08d}")
        first_s = time.perf_counter() - started
        before = tree_cpu_s(learner.process.pid)
        await asyncio.sleep(IDLE_S)
        used = tree_cpu_s(learner.process.pid) - before
    await store.close()
    name = f"agl learn after {count:,} conversations, nothing happens"
    return [
        Figure(name=f"a learner's first look at {count:,} conversations", value=count / first_s, unit="/s"),
        Figure(name=name, value=100 * used / IDLE_S, unit="% CPU", bar=1.0, better="lower"),
    ]


def _ratio(found: Mapping[str, list[Turn]], name: str) -> list[float]:
    """Return the p99 of each turn with a learner, divided by that of the same round without one."""
    return sorted(turn.p99 / bare.p99 for turn, bare in zip(found[name], found["no learner"], strict=True))


def compared(found: Mapping[str, list[Turn]]) -> list[Figure]:
    """The latencies of each case, and their ratios."""
    figures: list[Figure] = []
    bare = found["no learner"]
    for name, turns in found.items():
        for label, own, base in (
            ("p50", [turn.p50 for turn in turns], [turn.p50 for turn in bare]),
            ("p99", [turn.p99 for turn in turns], [turn.p99 for turn in bare]),
        ):
            values = [statistics.median(each) * 1e3 for each in (own, base)]
            figures.append(
                Figure(
                    name=f"{label}, {name}", value=values[0], unit="ms", baseline=values[1], baseline_name="no learner"
                )
            )
    for name in list(found)[1:]:
        ratios = _ratio(found, name)
        title = f"p99 ratio, {name}, {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds"
        bar = 1.2 if name == TRAINS else None
        figures.append(Figure(name=title, value=statistics.median(ratios), unit="", bar=bar, better="lower"))
        cpu = statistics.median([turn.cpu for turn in found[name]])
        figures.append(Figure(name=f"CPU of {name}", value=100 * cpu, unit="%"))
    return figures


def run(*, quick: bool) -> list[Figure]:
    """Every figure; quickly with fewer and shorter turns and fewer recorded conversations."""
    found = served(rounds=1 if quick else ROUNDS, turn_s=4 if quick else TURN_S)
    with tempfile.TemporaryDirectory() as folder:
        own = asyncio.run(recorded(Path(folder), count=2_000 if quick else RECORDED))
        return [*compared(found), *own]


if __name__ == "__main__":
    print(table(run(quick=False)))
