"""Steps per minute of `verl` that collects the next step's rollouts while this one trains, beside one that waits.

An agent makes calls and waits 200 ms before each, as for a tool; its reward is the share of small letters in what the
model wrote. Every run starts from the same random weights, trains the same number of steps with the same settings, and
counts the time from the end of its first step to that of its last. The modes take turns, and medians count; on a busy
machine nothing is gained, because there is no idle time left to train in. The final reward is the mean of the last
steps. In one process the model serves and trains on the CPU side by side; on Ray they are processes of their own.
Run alone: ``python -m benchmarks.bench_ahead``; it needs agl-algo-verl and agl-algo-torch in one environment.
"""

import asyncio
import logging
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai

import agl
from agl.algorithms import algorithm
from agl_run import Quiet, policy, runner
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure, table
from benchmarks.bench_verl import make_model

WAIT_S = 0.2
TASKS = [{"text": f"task {number}: "} for number in range(16)]
BATCH, ROLLOUTS = 4, 8
LAST = 3
"""Steps at the end whose mean reward is the final one."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "sync": {},
    "ahead": {
        "algorithm": {"rollout_correction": {"rollout_is": "token"}},
        "trainer": {
            "v1": {
                "trainer_mode": "colocate_async",
                "sampler": {"max_off_policy_threshold": 2, "max_off_policy_strategy": "wait"},
            }
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One experiment: calls of a rollout, passes over a step's rows, steps, the policy and VERL's keys beside."""

    calls: int
    epochs: int
    steps: int
    policy: str
    keys: Mapping[str, Any]


SHAPES = {
    "in one process": Shape(calls=5, epochs=2, steps=30, policy="torch", keys={}),
    "on Ray": Shape(calls=10, epochs=2, steps=30, policy="verl", keys={"engine": "ray", "rollout": {"name": "agl_hf"}}),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The rate of a run's steps, per minute, its first and its final reward, and the largest staleness."""

    rate: float
    first: float
    final: float
    staleness: float


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where VERL is not installed. A quick look leaves Ray out."""
    if not all(map(find_spec, ("agl_algo_torch", "agl_algo_verl", "verl"))):
        return []
    logging.getLogger("httpx").setLevel(logging.WARNING)
    figures: list[Figure] = []
    for name, shape in list(SHAPES.items())[: 1 if quick else 2]:
        with tempfile.TemporaryDirectory() as folder:
            found = in_turn(Path(folder), shape, repeats=1 if quick else 3)
        figures += [
            Figure(
                name=f"steps per minute, collecting ahead, {name}",
                value=found["ahead"].rate,
                unit="/min",
                bar=1.3 * found["sync"].rate,
                baseline=found["sync"].rate,
                baseline_name=f"synchronous; final rewards {found['ahead'].final:.2f} and {found['sync'].final:.2f}",
            ),
            Figure(
                name=f"final reward, collecting ahead, {name}",
                value=found["ahead"].final,
                unit="",
                bar=found["sync"].final - 0.05,
                baseline=found["sync"].final,
                baseline_name=f"synchronous; both began at {found['sync'].first:.2f}",
            ),
            Figure(
                name=f"versions behind, collecting ahead, {name}",
                value=found["ahead"].staleness,
                unit="",
                bar=1.0,
                better="lower",
            ),
        ]
    return figures


def in_turn(folder: Path, shape: Shape, *, repeats: int) -> dict[str, Outcome]:
    """Run both modes in turn, several times, so that a busy neighbour slows each alike; returns their medians."""
    found: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
    for number in range(repeats):
        for mode, runs in found.items():
            runs.append(train(folder / f"{mode}-{number}", shape, mode))
    return {mode: middle(runs) for mode, runs in found.items()}


def middle(runs: Sequence[Outcome]) -> Outcome:
    """The medians of several runs, and the largest staleness of them all."""
    return Outcome(
        rate=statistics.median(one.rate for one in runs),
        first=statistics.median(one.first for one in runs),
        final=statistics.median(one.final for one in runs),
        staleness=max(one.staleness for one in runs),
    )


def train(folder: Path, shape: Shape, mode: str) -> Outcome:
    """Run an experiment and return what came of it."""
    folder.mkdir(parents=True)
    model = make_model(folder / "model", vocabulary=260)
    keys: dict[str, Any] = {
        "data": {"train_batch_size": BATCH},
        "actor_rollout_ref": {
            "rollout": {"n": ROLLOUTS, **shape.keys.get("rollout", {})},
            "actor": {"optim": {"lr": 2e-3}, "ppo_epochs": shape.epochs},
        },
        "threads": 1,
        **({"engine": shape.keys["engine"]} if "engine" in shape.keys else {}),
    }
    keys |= {name: dict(value) for name, value in MODES[mode].items()}
    keys["trainer"] = {**keys.get("trainer", {}), "total_training_steps": shape.steps}
    url = f"sqlite:///{folder}/runs.db"
    trainer = agl.Trainer(
        name="bench",
        algorithm=algorithm("verl", tunes="llm", **keys),
        policies={"llm": policy(shape.policy, model=str(model), threads=1)},
        runner=runner("async", concurrency=2 * BATCH * ROLLOUTS),
        store=url,
        folder=folder,
        progress=Quiet(),
    )
    trainer.fit(agent_of(shape.calls), TASKS)
    return asyncio.run(outcome(url, shape.steps))


def agent_of(calls: int) -> Any:
    """An agent that waits before each of so many calls."""

    async def write(task: dict[str, str], llm: agl.LLM) -> float:
        said: list[Any] = [{"role": "user", "content": task["text"]}]
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
            for _ in range(calls):
                await asyncio.sleep(WAIT_S)
                answer = await client.chat.completions.create(model=llm.model, messages=said, max_tokens=8)
                said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        written = "".join(message["content"] for message in said[1:])
        return sum("a" <= letter <= "z" for letter in written) / max(1, len(written))

    return write


async def outcome(url: str, steps: int) -> Outcome:
    """Read what a run logged."""
    store = SQLiteStore(url)
    try:
        rewards = {each.step: each for each in await store.metrics("bench", name="reward")}
        ages = [each.value for each in await store.metrics("bench", name="staleness_max")]
    finally:
        await store.close()
    minutes = (rewards[steps].time - rewards[1].time) / 60
    return Outcome(
        rate=(steps - 1) / minutes,
        first=rewards[1].value,
        final=statistics.mean(rewards[step].value for step in range(steps - LAST + 1, steps + 1)),
        staleness=max(ages, default=0.0),
    )


if __name__ == "__main__":
    print(table(run(quick=False)))
