"""Steps and rollouts that `refill` and `curriculum` of `grpo` save where most groups are silent.

40 tasks, each a token of a tiny random model; a rollout is one token drawn after it, at once. 8 tasks can be learnt
(reward 1 for half of the vocabulary, another half for each of them), 16 are never solved, and 16 always are. Four arms
learn the same world from the same start, each with every seed: neither, rounds, a curriculum, both. Measured are the
steps and the rollouts until the policy puts 0.9 of its probability, on average over the 8 tasks, on rewarded tokens.
A step is one update and one publication, whose cost grows with the model; a rollout costs what the agent costs.
Run alone: ``python -m benchmarks.bench_sampling``; it needs agl-algo-torch.
"""

import asyncio
import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl.schemas import Episode, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_testing.conformance import AlgorithmBench, AlgorithmScenario, RolloutOrder
from benchmarks._harness import Figure, component, table
from benchmarks.bench_verl import save_tokenizer

TASKS, LEARNABLE, SOLVED = 40, 8, 16
VOCABULARY = 300
GOOD, STEPS = 0.9, 300
COMMON = {"tasks_per_step": 4, "group_size": 4, "steps": STEPS}
TABLES = {"optim": {"lr": 1e-2}, "compute": {"device": "cpu", "threads": 1}}
ARMS: dict[str, dict[str, Any]] = {
    "neither": {},
    "refill = 4": {"refill": 4},
    'curriculum = "frontier"': {"curriculum": "frontier"},
    "both": {"refill": 4, "curriculum": "frontier"},
}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Steps and rollouts until the policy was good; `STEPS` where it never was."""

    steps: int
    rollouts: int


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    if not find_spec("agl_algo_torch"):
        return []
    seeds = range(1 if quick else 3)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: [asyncio.run(learn(Path(folder) / f"{place}-{seed}", seed=seed, params=params)) for seed in seeds]
            for place, (name, params) in enumerate(ARMS.items())
        }
    return [
        figure(name, unit, {arm: [getattr(effort, unit) for effort in efforts] for arm, efforts in found.items()})
        for unit in ("steps", "rollouts")
        for name in ARMS
        if name != "neither"
    ]


def figure(arm: str, unit: str, efforts: dict[str, list[int]]) -> Figure:
    """Return the median over seeds of one arm beside that of the one with neither."""
    seeds = ", ".join(f"{with_it}/{without}" for with_it, without in zip(efforts[arm], efforts["neither"], strict=True))
    return Figure(
        name=f"{unit} to {GOOD} with {arm} ({seeds})",
        value=statistics.median(efforts[arm]),
        unit=unit,
        better="lower",
        baseline=statistics.median(efforts["neither"]),
        baseline_name="every task as often, and no rounds",
    )


async def learn(folder: Path, *, seed: int, params: dict[str, Any]) -> Effort:
    """Train until the policy is good."""
    world = World(folder / "model", seed=seed)
    scenario = AlgorithmScenario(
        make=lambda: component("algorithm", "grpo", **COMMON, **TABLES, sampling=params),
        play=world.play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(folder / "model"))},
        train=[{"n": number} for number in range(TASKS)],
    )
    bench = AlgorithmBench(scenario, folder / "work")
    async with bench:
        algorithm = scenario.make()
        await algorithm.setup(replace(bench.context(), seed=seed))
        step = 0
        while world.skill < GOOD and step < STEPS:
            step += 1
            await algorithm.step()
            world.use(bench.context().current("llm"))
        await algorithm.close()
    return Effort(steps=step, rollouts=len(bench.collected))


class World:
    """Draws a rollout's token from the live weights, all tasks of a version in one pass."""

    def __init__(self, model: Path, *, seed: int) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
        made = Qwen2ForCausalLM(config)
        made.save_pretrained(model)
        save_tokenizer(model)
        halves = [random.Random(f"{seed}/{n}").sample(range(VOCABULARY), VOCABULARY // 2) for n in range(LEARNABLE)]
        self._good = [set(half) for half in halves]
        self._version = "v0"
        self._logp = self._logprobs(made)

    @property
    def skill(self) -> float:
        """Probability of a rewarded token, on average over the tasks that can be learnt."""
        masses = [float(self._logp[n][sorted(good)].exp().sum()) for n, good in enumerate(self._good)]
        return statistics.fmean(masses)

    def use(self, version: Any) -> None:
        """Take the weights of a version, unless they are the ones in use."""
        from transformers import Qwen2ForCausalLM

        if version.version != self._version:
            self._version = version.version
            self._logp = self._logprobs(Qwen2ForCausalLM.from_pretrained(version.resource.uri))

    def _logprobs(self, model: Any) -> Any:
        """Return the log-probability of each token after each task, [tasks, vocabulary]."""
        import torch

        with torch.no_grad():
            return model(input_ids=torch.arange(TASKS)[:, None]).logits[:, -1].float().log_softmax(-1)

    def play(self, order: RolloutOrder) -> Episode:
        """Draw one token for the rollout's task."""
        rollout, task = order.rollout, int(order.rollout.task["n"])
        weights = self._logp[task].exp().tolist()
        (token,) = random.Random(f"{self._good[0]}/{rollout.rollout_id}").choices(range(VOCABULARY), weights)
        reward = float(token in self._good[task]) if task < LEARNABLE else float(task < LEARNABLE + SOLVED)
        span = f"{rollout.rollout_id}/0"
        call = Transition(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt_id, span_id=span, branch=0)
        row = Row(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt_id,
            group_id=rollout.group_id,
            branch=0,
            ids=pack_ids([task, token]),
            mask=bytes([0, 1]),
            logprobs=pack_floats([0.0, float(self._logp[task][token])]),
            segments=(Segment(start=1, stop=2, span_id=span),),
        )
        return Episode(rollout=rollout, attempt=None, reward=reward, transitions=(call,), rows=(row,))


if __name__ == "__main__":
    print(table(run(quick=False)))
