"""ReMax in `verl`: rollouts are compared with a greedy rollout of their task, which is never trained."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agl_testing.conformance import AlgorithmConformance
from agl_testing.conformance.bench import AlgorithmBench

from .world import World, scenario

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import StepReport
    from agl.schemas import Episode
    from agl_testing.conformance import AlgorithmScenario
    from agl_testing.conformance.bench import RolloutOrder


class GreedyWorld(World):
    """A world in which the greedy rollout of a task has the reward `greedy`, or none for `None`."""

    def __init__(self, greedy: float | None) -> None:
        super().__init__()
        self.greedy = greedy

    def play(self, order: RolloutOrder) -> Episode:
        played = super().play(order)
        return msgspec.structs.replace(played, reward=self.greedy) if order.is_greedy else played


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario(model_dir, GreedyWorld(0.25), estimator="remax", **{"sampling.curriculum": "frontier"})


def first_step(model_dir: Path, folder: Path, greedy: float | None, **keys: Any) -> tuple[StepReport, AlgorithmBench]:
    chosen = scenario(model_dir, GreedyWorld(greedy), **{"algorithm.adv_estimator": "remax", **keys})

    async def body() -> tuple[StepReport, AlgorithmBench]:
        async with AlgorithmBench(chosen, folder) as bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            report = await algorithm.step()
            await algorithm.close()
            return report, bench

    return asyncio.run(body())


def test_one_greedy_rollout_per_task_is_compared_with_and_not_trained(model_dir: Path, tmp_path: Path) -> None:
    report, bench = first_step(model_dir, tmp_path, 0.25)
    greedy = {name for name in bench.collected if "-greedy-" in name}
    assert 2 == len(greedy) == report.metrics["rollouts_greedy"]
    assert set(bench.collected) - greedy == set(report.trained)
    for name in report.trained:
        reward = bench.collected[name].reward or 0.0
        assert [reward - 0.25] * 2 == pytest.approx([use.advantage for use in report.uses[name]])


def test_one_rollout_per_task_is_enough(model_dir: Path, tmp_path: Path) -> None:
    report, _ = first_step(model_dir, tmp_path, -1.0, **{"rollout.n": 1})
    assert (2, 0.0) == (len(report.trained), report.metrics["groups_silent"])


def test_tasks_whose_greedy_rollout_has_no_reward_are_left_out(model_dir: Path, tmp_path: Path) -> None:
    report, bench = first_step(model_dir, tmp_path, None)
    assert ((), 2.0) == (report.trained, report.metrics["groups_without_baseline"])
    assert 1.0 == report.metrics["updates_skipped"]
    assert set(bench.collected) == set(report.uses)
