"""Fine-tuning on the best rollouts, which RFT itself or another algorithm has collected."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agl.contracts import Recorded
from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.rft import NONE_GOOD, RFT
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, mean_reward, paid_by_another, published, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agl.schemas import Episode


def scenario_of(model_dir: Path, **params: Any) -> AlgorithmScenario:
    settings = {
        "min_reward": 0.6,
        "steps": 3,
        "tasks_per_step": 4,
        "group_size": 4,
        "lr": 3e-3,
        "threads": 1,
        "device": "cpu",
        **params,
    }
    return AlgorithmScenario(
        make=lambda: made(RFT, **{name: value for name, value in settings.items() if value is not None}),
        play=World().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return replace(scenario_of(model_dir), make_longer=scenario_of(model_dir, steps=4).make)


@pytest.mark.long
def test_imitating_the_best_raises_the_reward(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=6, tasks_per_step=8, best=1), tmp_path / "work")
    reports = asyncio.run(run(bench))
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.15, [r.metrics["reward"] for r in reports]


def test_good_rollouts_of_another_algorithm_are_imitated_once(model_dir: Path, tmp_path: Path) -> None:
    episodes = paid_by_another(model_dir, count=128)
    good = sorted(e.rollout.rollout_id for e in episodes if (e.reward or 0.0) >= 0.5)
    own = {"steps": None, "tasks_per_step": None, "group_size": None}
    scenario = scenario_of(model_dir, min_reward=0.5, epochs=6, lr=1e-2, **own)
    bench = AlgorithmBench(scenario, tmp_path / "work", given=Recorded(episodes=tuple(episodes), dropped={"stale": 3}))

    (report,) = asyncio.run(run(bench))

    assert good
    assert good == sorted(report.trained)
    assert (3.0, float(len(good))) == (report.metrics["dropped_stale"], report.metrics["imitated"])
    assert "the sources have nothing more" == report.stop_reason
    assert {} == bench.collected
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.1


@pytest.mark.long
class TestConformanceWithChosenTasks(AlgorithmConformance):
    """Rounds and a curriculum must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        train = [{"n": number} for number in range(12)]
        scenario = scenario_of(model_dir, min_reward=0.5, tasks_per_step=2, refill=2, curriculum="unsolved")
        return replace(scenario, train=train)


def test_groups_without_a_rollout_to_imitate_are_replaced(model_dir: Path, tmp_path: Path) -> None:
    params = {"steps": 1, "min_reward": 1.0, "tasks_per_step": 2, "group_size": 2, "refill": 20}
    scenario = replace(scenario_of(model_dir, **params), train=[{"n": number} for number in range(40)])
    bench = AlgorithmBench(scenario, tmp_path / "work")
    (report,) = asyncio.run(run(bench))
    assert (2.0, 0.0) == (report.metrics["groups"] - report.metrics["groups_dropped"], report.metrics["groups_missing"])
    assert report.metrics["groups_dropped"] > 0
    best = {e.rollout.group_id: 0.0 for e in bench.collected.values()}
    for e in bench.collected.values():
        best[e.rollout.group_id] = max(best[e.rollout.group_id], e.reward or 0.0)
    silent = {e.rollout.rollout_id for e in bench.collected.values() if best[e.rollout.group_id] < 1.0}
    dropped = {name for name, uses in report.uses.items() if {NONE_GOOD} == {use.note for use in uses}}
    assert silent == dropped


def test_nothing_good_enough_trains_and_publishes_nothing(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, min_reward=2.0, steps=1), tmp_path / "work")
    (report,) = asyncio.run(run(bench))
    assert ((), 1.0, []) == (report.trained, report.metrics["updates_skipped"], bench.published)


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        ({"max_age": 2}, False, "max_age without a source"),
        ({"tasks_per_step": None, "group_size": None, "refill": 2}, True, "chose its own tasks, so refill would"),
        (
            {"tasks_per_step": None, "group_size": None, "refill": 2, "curriculum": "frontier"},
            True,
            "so refill and curriculum would be ignored",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    params: dict[str, Any], given: bool, message: str, model_dir: Path, tmp_path: Path
) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, **params), tmp_path / "work", given=Recorded() if given else None)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(run(bench))


def test_groups_keep_their_best_and_the_earlier_of_equals(model_dir: Path) -> None:
    group: Sequence[Episode] = paid_by_another(model_dir, count=8)
    ranked = sorted(group, key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id))
    kept = made(RFT, min_reward=-1.0, best=3)._good(group)
    assert [e.rollout.rollout_id for e in ranked[:3]] == [e.rollout.rollout_id for e in kept]


def test_failed_rollout_is_not_imitated_whatever_its_reward(model_dir: Path) -> None:
    group: Sequence[Episode] = paid_by_another(model_dir, count=3)
    failed = msgspec.structs.replace(group[0].rollout, status="failed")
    group = [msgspec.structs.replace(group[0], rollout=failed, reward=1.0), *group[1:]]
    kept = made(RFT, min_reward=-1.0)._good(group)
    assert {e.rollout.rollout_id for e in group[1:]} == {e.rollout.rollout_id for e in kept}
