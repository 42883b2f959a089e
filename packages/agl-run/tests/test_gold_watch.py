"""A run pairs gold rewards with the reward that trains, logs them, and alerts once when they drift apart."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl import AlgorithmEntry, PluginManager, Reward, Rollout, Span, hookimpl
from agl.algorithms import algorithm
from agl.contracts import AlgorithmContext, StepReport
from agl.schemas import PromptTemplate
from agl.stores import MemoryStore
from agl_inspect.advice.suggestions import read_alerts
from agl_run import Quiet, Trainer

TASKS = [{"n": n} for n in range(12)]
EXPLOIT = 6


class StoppedError(Exception):
    """Stands for a kill between two steps."""


class Stepping:
    """Collects one rollout of every task in each step, and notes the rewards that trained."""

    rewards: list[float | None]
    stop: list[int]

    async def setup(self, context: AlgorithmContext) -> None:
        self._context, self._step = context, 0

    async def step(self) -> StepReport:
        if self._step in self.stop:
            raise StoppedError
        self._step += 1
        collected = await self._context.collect(self._context.train, step=self._step)
        self.rewards += [one.reward for one in collected.episodes]
        return StepReport(step=self._step, is_finished=self._step == 12)

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None: ...


def judged(rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
    """The reward that trains goes to 1 from a step on, while the gold reward of every second task goes to 0."""
    exploits, noise = rollout.metadata["step"] >= EXPLOIT, 0.1 * (rollout.task["n"] % 3)
    gold = Reward(value=0.0 if exploits else 0.4 + noise, name="gold", is_gold=True)
    reward = Reward(value=1.0 if exploits else 0.5, name="judge")
    return [reward, gold] if rollout.task["n"] % 2 else [reward]


def run(store: MemoryStore, folder: Path, *, stop: list[int], resume: bool = False) -> list[float | None]:
    made = type("Made", (Stepping,), {"rewards": [], "stop": stop})

    class Plugin:
        @hookimpl
        def agl_algorithms(self) -> list[AlgorithmEntry]:
            return [AlgorithmEntry(name="made", factory=made, tunes=("prompt_template",), needs_token_ids=False)]

    manager = PluginManager()
    manager.register(Plugin(), name="made")
    Trainer(
        name="gold",
        store=store,
        folder=folder,
        rewards=[judged],
        algorithm=algorithm("made"),
        initial_resources={"prompt": PromptTemplate(template="none")},
        plugins=manager,
        progress=Quiet(),
    ).fit(lambda task: "done", TASKS, resume=resume)
    return made.rewards


@pytest.mark.parametrize("stop", [[], [5], [7]])
def test_drift_from_gold_is_one_alert_also_over_a_resume(stop: list[int], tmp_path: Path) -> None:
    store = MemoryStore()
    if stop:
        with pytest.raises(StoppedError):
            run(store, tmp_path, stop=stop)
    rewards = run(store, tmp_path, stop=[], resume=bool(stop))
    assert {0.5, 1.0} >= set(rewards)
    assert 1.0 == rewards[-1]
    metrics = asyncio.run(store.metrics("gold"))
    found = {(one.step, one.name): one.value for one in metrics}
    assert pytest.approx(0.5) == found[1, "gold_reward"]
    assert pytest.approx(0.0) == found[1, "gold_gap"]
    assert pytest.approx((0.0, 1.0)) == (found[12, "gold_reward"], found[12, "gold_gap"])
    assert 1.0 > found[EXPLOIT - 1, "gold_evidence"]
    assert 40.0 < found[EXPLOIT + 4, "gold_evidence"]
    alerts = [one.found for one in asyncio.run(read_alerts(store, "gold", 1)) if one.found.rule == "gold-gap"]
    (alert,) = alerts
    assert "made" == alert.algorithm
    assert EXPLOIT <= alert.step < EXPLOIT + 5
    assert "runs away from the gold reward" in alert.evidence
