"""Two agents that have to agree: in turns on fresh rollouts they meet, together on the same ones they do not."""

import random
from math import exp
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.errors import ConfigError
from agl.schemas import JsonResource
from agl_run import Quiet
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import math

import agl
from agl.contracts import StepReport
from agl.schemas import JsonResource
from agl_testing.toys import ToyAlgorithm

LIMIT = 2.0  # of the logit: every agent tries the other answer now and then


class Tabular(ToyAlgorithm):
    """Policy gradient on one logit, in steps so large that each is nearly the best response."""

    def __init__(self, *, steps=8, n=64):
        self._steps, self._n, self._step, self._after = steps, n, 0, {}

    async def step(self):
        self._step += 1
        context, (name,) = self._context, self._context.tunes
        if context.sources:
            found = await context.recorded(after=self._after)
            self._after = found.steps
        else:
            found = await context.collect(context.train, step=self._step, n=self._n)
        groups = {True: [], False: []}
        for episode in found.episodes:
            (reward,) = episode.rewards
            groups[bool(reward.dimensions[name])].append(episode.reward)
        mean = {answer: sum(rewards) / len(rewards) for answer, rewards in groups.items() if rewards}
        if len(mean) == 2:
            logit = context.current(name).resource.value + 20.0 * (mean[True] - mean[False])
            await context.publish(name, JsonResource(value=min(LIMIT, max(-LIMIT, logit))), step=self._step)
        metrics = {"reward": sum(map(sum, groups.values())) / max(1, len(found.episodes))}
        return StepReport(step=self._step, is_finished=self._step == self._steps, metrics=metrics)

    def state(self):
        return {"step": self._step, "after": self._after}

    async def restore(self, state):
        self._step, self._after = state["step"], state["after"]


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="tabular", factory=Tabular, tunes=("json",), needs_token_ids=False, shares=True)
'''


async def meet(task: str, rollout: Any, left: float, right: float) -> None:
    """Reward equal answers of both agents, which they draw in training and take by the larger chance otherwise."""
    draw = random.Random(rollout.metadata["seed"])
    is_drawn = rollout.mode == "train"
    answers = [1 / (1 + exp(-logit)) > (draw.random() if is_drawn else 0.5) for logit in (left, right)]
    agl.emit_reward({"met": answers[0] == answers[1], "left": answers[0], "right": answers[1]}, primary="met")


@pytest.fixture
def played(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Trains a team whose agents begin with different preferences; returns the rewards before and after."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    agl_plugins.install(PLUGIN, name="tabular")

    def run(*, seed: int, **second: Any) -> tuple[float | None, float | None]:
        result = agl.Trainer(
            algorithm=[
                algorithm("tabular", name="first", tunes="left"),
                algorithm("tabular", name="second", tunes="right", **second),
            ],
            initial_resources={"left": JsonResource(value=0.7), "right": JsonResource(value=-0.7)},
            schedule={"mode": "alternate"},
            store="memory://",
            folder=tmp_path / f"{seed}",
            seed=seed,
            progress=Quiet(),
        ).fit(meet, train_dataset=["x"], val_dataset=["x"], fresh=True)
        return result.before, result.last

    return run


@pytest.mark.parametrize("seed", range(5))
def test_team_in_turns_meets_where_training_on_shared_rollouts_misses(played: Any, seed: int) -> None:
    assert (0.0, 1.0) == played(seed=seed)
    assert (0.0, 0.0) == played(seed=seed, source="first")


def test_settings_of_collecting_are_refused_with_a_source(played: Any) -> None:
    with pytest.raises(ConfigError, match="so group_size would be ignored; remove it, or remove the source"):
        played(seed=0, source="first", group_size=4)
