"""CPU time of every view of ``agl console``, and the memory of its process, over a SQLite store.

Run it with ``python -m benchmarks.bench_console [--rollouts 50000] [--store FILE]``: a million spans, whose store takes
minutes to write; ``--store`` keeps it for the next time. The baseline is the same view over a tenth of the rollouts.
"""

import argparse
import asyncio
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from agl import semconv
from agl.contracts import CallUse, ExperimentRecord, Metric, Moments
from agl.schemas import (
    ModelCall,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    Reward,
    Rollout,
    Span,
    pack_floats,
    pack_ids,
    to_builtins,
)
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally, add_tallies
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure, table

VIEW_MS = 50.0
RSS_MB = 100.0

STEP = 64
GROUP = 8
BATCH = 250
REPEATS = 10
AGENTS = ("planner", "writer", "critic")

VIEWS = {
    "runs": "/",
    "learning": "/runs/large",
    "agents": "/runs/large/agents",
    "rollouts": "/rollouts?experiment=large",
    "rollouts of a step": "/rollouts?experiment=large&algorithm=grpo&step=7",
    "rollouts by reward": "/rollouts?experiment=large&low=0.9",
    "rollouts by a reject reason that none has": "/rollouts?experiment=large&reject=missing_token_ids",
    "rollouts by words that none holds": "/rollouts?experiment=large&said=nothing+of+this+kind",
    "rollout": "/rollouts/{rollout}",
    "tokens": "/rollouts/{rollout}/tokens",
    "group": "/group?experiment=large&group=task-0",
    "versions": "/versions",
    "version": "/versions/style",
}


def run(*, quick: bool) -> list[Figure]:
    """The figures over 2,000 rollouts, or 500 for a quick look; none where ``agl-console`` is not installed."""
    return measured(500 if quick else 2000) if find_spec("agl_console") else []


def measured(rollouts: int, kept: Path | None = None) -> list[Figure]:
    """The figures over so many rollouts; their store is kept where a file is named."""
    with tempfile.TemporaryDirectory() as folder:
        large, small = kept or Path(folder) / "large.db", Path(folder) / "small.db"
        for path, count in ((large, rollouts), (small, max(STEP, rollouts // 10))):
            if not path.exists():
                asyncio.run(fill(path, count))
        (found, memory), (less, less_memory) = (times(path) for path in (large, small))
    spans = f"{rollouts * SPANS:,} spans"
    figures = [
        Figure(
            name=f"console, {name}, {spans}",
            value=1e3 * found[name],
            unit="ms",
            bar=VIEW_MS,
            better="lower",
            baseline=1e3 * less[name],
            baseline_name="over a tenth of the rollouts",
        )
        for name in VIEWS
    ]
    resident = Figure(
        name=f"console, memory after all views, {spans}",
        value=memory,
        unit="MB",
        bar=RSS_MB,
        better="lower",
        baseline=less_memory,
        baseline_name="over a tenth of the rollouts",
    )
    return [*figures, resident]


def times(path: Path) -> tuple[dict[str, float], float]:
    """The CPU time of every view in seconds, and the memory of the console in megabytes after all of them."""
    rollout = rollout_id(0)
    with served(path) as (address, pid):
        found = {name: spent(pid, address + view.format(rollout=rollout)) for name, view in VIEWS.items()}
        memory = re.search(r"VmRSS:\s+([0-9]+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return found, int(memory[1]) / 1024 if memory else 0.0


@contextmanager
def served(path: Path) -> Generator[tuple[str, int]]:
    """``agl console`` over a store: its address and its process."""
    command = [sys.executable, "-m", "agl", "console", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2].removesuffix("/"), process.pid
        process.terminate()


def spent(pid: int, address: str) -> float:
    """CPU seconds of the console's process for an answer, the mean over some requests after a first one."""
    urlopen(address).read()
    started = cpu_s(pid)
    for _ in range(REPEATS):
        urlopen(address).read()
    return (cpu_s(pid) - started) / REPEATS


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, in steps of a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rollout_id(number: int) -> str:
    return f"large-1-grpo-train-{number // STEP + 1:05d}-{number % STEP // GROUP:05d}-{number % GROUP:03d}"


async def fill(path: Path, rollouts: int) -> None:
    """Record so many rollouts of a team, in groups and steps, as a run with a prompt in training does."""
    store = SQLiteStore(f"sqlite:///{path}")
    steps = (rollouts + STEP - 1) // STEP
    experiment = ExperimentRecord(name="large", live={"style": f"large-1-grpo-{steps}"}, turn=steps, agent="team:solve")
    await store.save_state({}, experiment=experiment)
    versions = [version(step) for step in range(1, steps + 1)]
    await store.publish(versions)
    for step in range(1, steps + 1):
        values = {"reward": step / steps, "collect_s": 2.0, "update_s": 1.0, "kl": 0.01}
        await store.log_metrics(
            [
                Metric(experiment="large", algorithm="grpo", step=step, name=name, value=value, experiment_step=step)
                for name, value in values.items()
            ]
        )
    await add_tallies(store, experiment, [tally(step) for step in range(1, steps + 1)])
    for start in range(0, rollouts, BATCH):
        await record(store, range(start, min(rollouts, start + BATCH)))
    await store.close()


def version(step: int) -> ResourceVersion:
    text = PromptTemplate(template=f"Answer in {step} words.\n" * 20)
    parent = f"large-1-grpo-{step - 1}" if step > 1 else ""
    return ResourceVersion(
        name="style", version=f"large-1-grpo-{step}", resource=text, parent=parent, algorithm="grpo", step=step
    )


def tally(step: int) -> StepTally:
    """The sums of a step, as the driver keeps them."""
    moments = Moments(count=2 * STEP, mean=0.5, squares=1.0)
    sums = {"rollouts": STEP, "calls": 2 * STEP, "tokens": 100 * STEP, "trained": 100 * STEP, "seconds": 1.0}
    agents = tuple(
        AgentTally(agent=agent, reward=moments, credit=moments, advantage=moments, **sums) for agent in AGENTS
    )
    ends = {"reward": 0.5, "low": 0.4, "high": 0.6}
    return StepTally(algorithm="grpo", step=step, mode="train", rollouts=STEP, agents=agents, **ends)


async def record(store: SQLiteStore, numbers: range) -> None:
    made = [
        Rollout(
            rollout_id=rollout_id(number),
            task={"question": f"What is {number} + 1?"},
            experiment="large",
            group_id=f"task-{number // GROUP % 100}",
            metadata={"algorithm": "grpo", "step": number // STEP + 1},
        )
        for number in numbers
    ]
    await store.enqueue(made)
    claims = await store.claim(worker="worker@here:1:a", limit=len(made), experiment="large")
    outcomes = [
        Outcome(
            attempt_id=claim.attempt.attempt_id,
            status="succeeded",
            spans=tuple(spans(claim.rollout.rollout_id, claim.attempt.attempt_id, number)),
        )
        for number, claim in zip(numbers, claims, strict=True)
    ]
    await store.finish(outcomes)
    await store.append_spans([training(number) for number in numbers])


IDS = pack_ids(range(1000, 1200))
LOGPROBS = pack_floats([-0.1] * 50)
ENTROPIES = struct.pack("<50e", *[0.3] * 50)


def spans(rollout_id: str, attempt_id: str, number: int) -> Iterator[Span]:
    """The root, six turns of agents with a call and a tool each, and a reward."""
    start = 1_700_000_000_000_000_000 + number * 1_000_000_000

    def span(at: int, name: str, parent: int | None, **fields: Any) -> Span:
        return Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            span_id=f"{at:016x}",
            parent_id=None if parent is None else f"{parent:016x}",
            name=name,
            start_ns=start + at * 10_000_000,
            end_ns=start + at * 10_000_000 + 9_000_000,
            **fields,
        )

    yield span(0, semconv.ROOT_SPAN_NAME, None)
    for turn in range(6):
        agent, at = AGENTS[turn % len(AGENTS)], 1 + 3 * turn
        attributes = {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: agent}
        yield span(at, f"invoke_agent {agent}", 0, attributes=attributes)
        yield span(at + 1, "chat small", at, call=call(number, turn))
        attributes = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "look_up"}
        status = "error" if number % 50 == 0 else "ok"
        yield span(at + 2, "execute_tool look_up", at, attributes=attributes, status=status)
    yield span(19, "evaluate grade", 0, reward=Reward(value=number % GROUP / GROUP, name="grade", source="evaluator"))


SPANS = 21
"""Spans of a rollout: twenty of its attempt, and the record of its training."""


def call(number: int, turn: int) -> ModelCall:
    return ModelCall(
        request_id=f"{number}-{turn}",
        dialect="chat",
        policy="small",
        model="small",
        model_version=f"v{number // STEP + 1}",
        request={"messages": [{"role": "user", "content": "What is the answer? Think of it. " * 8}]},
        response={"choices": [{"message": {"role": "assistant", "content": f"It may be {number + turn}."}}]},
        prompt_ids=IDS[: 4 * 150],
        response_ids=pack_ids(range(number % 100, number % 100 + 50)),
        logprobs=LOGPROBS,
        finish_reason="stop",
    )


def training(number: int) -> Span:
    """The record of a step's training that ``agl why`` reads."""
    advantage = (number % GROUP) / GROUP - 0.5
    uses = [
        CallUse(
            span_id=f"{2 + 3 * turn:016x}",
            row=turn,
            credit=advantage + 0.5,
            advantage=advantage,
            tokens={"entropy": ENTROPIES},
        )
        for turn in range(6)
    ]
    step = {"experiment": "large", "run": 1, "algorithm": "grpo", "step": number // STEP + 1}
    return Span(
        rollout_id=rollout_id(number),
        attempt_id="",
        span_id=f"{number:016x}",
        name="training by grpo",
        attributes={"agl.training": {**step, "note": "", "calls": to_builtins(uses)}},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_console", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts of twenty spans each")
    parser.add_argument("--store", type=Path, metavar="FILE", help="write the store here, and use it if it is there")
    options = parser.parse_args()
    print(table(measured(options.rollouts, options.store)))
