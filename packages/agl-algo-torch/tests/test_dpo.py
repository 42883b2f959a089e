"""DPO: the loss by hand, the gradient against autograd, and whether preferred tokens become more likely."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from agl.contracts import Recorded
from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.preferences import DPO, Example, make_pairs
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, check_gradient, made, mean_reward, paid_by_another, published, run, with_rewards

if TYPE_CHECKING:
    from pathlib import Path


def scenario_of(model_dir: Path, *, rows: int = 1, **params: Any) -> AlgorithmScenario:
    settings = {
        "steps": 3,
        "tasks_per_step": 4,
        "group_size": 4,
        "lr": 3e-3,
        "threads": 1,
        "device": "cpu",
        **params,
    }
    return AlgorithmScenario(
        make=lambda: made(DPO, **{name: value for name, value in settings.items() if value is not None}),
        play=World(rows=rows).play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        settings = {"epochs": 2, "pairs_per_update": 2}
        longer = scenario_of(model_dir, **settings, steps=4)
        return replace(scenario_of(model_dir, **settings), make_longer=longer.make)


@pytest.mark.long
@pytest.mark.parametrize("params", [{"reference": "start"}, {"reference": "behaviour"}, {"pairs": "all"}])
def test_preferred_tokens_become_more_likely(model_dir: Path, tmp_path: Path, params: dict[str, Any]) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=8, tasks_per_step=8, **params), tmp_path / "work")
    reports = asyncio.run(run(bench))
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.15, [r.metrics["reward"] for r in reports]


def test_first_update_starts_at_no_preference(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=1), tmp_path / "work")
    (report,) = asyncio.run(run(bench))
    assert report.metrics["pairs"] > 0
    assert math.log(2) == pytest.approx(report.metrics["loss"], abs=1e-4)
    assert 0.0 == pytest.approx(report.metrics["margin"], abs=1e-3)


def test_pairs_of_another_algorithms_groups_are_learned_once(model_dir: Path, tmp_path: Path) -> None:
    given = Recorded(episodes=tuple(paid_by_another(model_dir, count=128)))
    scenario = scenario_of(model_dir, steps=None, tasks_per_step=None, group_size=None, epochs=8, lr=1e-2)
    bench = AlgorithmBench(scenario, tmp_path / "work", given=given)
    (report,) = asyncio.run(run(bench))
    assert ({}, "the sources have nothing more") == (bench.collected, report.stop_reason)
    assert 2 * report.metrics["pairs"] == len(report.trained)
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.1


def test_gradient_equals_that_of_the_whole_loss(model_dir: Path, tmp_path: Path) -> None:
    """The gradient is that of equation 7 of DPO's paper."""
    group = with_rewards(paid_by_another(model_dir, count=4, rows=2), 0.0, 1.0, 2.0, 0.0)
    pairs = make_pairs(group, gap=1e-6, pairing="all")

    def loss(ratios: dict[str, torch.Tensor], tokens: dict[str, int]) -> torch.Tensor:
        del tokens
        margins = torch.stack([ratios[pair.chosen] - ratios[pair.rejected] for pair in pairs])
        return -torch.nn.functional.logsigmoid(0.7 * margins).mean()

    dpo = made(DPO, beta=0.7, lr=1e-9, threads=1, device="cpu", token_budget=12)
    check_gradient(dpo, AlgorithmBench(scenario_of(model_dir, rows=2, steps=1), tmp_path / "work"), group, pairs, loss)


def test_pairs_are_the_extremes_or_all_that_differ_enough(model_dir: Path) -> None:
    rewards = [0.5, 1.0, 0.5, 0.0, None]
    played = paid_by_another(model_dir, count=5)
    group = [msgspec.structs.replace(e, reward=reward) for e, reward in zip(played, rewards, strict=True)]

    def named(pairs: list[Example]) -> list[tuple[str, str]]:
        return [(pair.chosen[-1], pair.rejected[-1]) for pair in pairs]

    assert [("1", "3")] == named(make_pairs(group, gap=0.1, pairing="extremes"))
    assert [("1", "0"), ("1", "2"), ("1", "3"), ("0", "3"), ("2", "3")] == named(
        make_pairs(group, gap=0.1, pairing="all")
    )
    assert [("1", "3")] == named(make_pairs(group, gap=0.6, pairing="all"))
    assert [] == make_pairs(group, gap=1.5, pairing="extremes")


def test_answers_to_different_tasks_of_a_group_are_no_pair(model_dir: Path) -> None:
    """With a `group_key` tasks may share a group, but probabilities of answers to two prompts cannot be compared."""
    played = with_rewards(paid_by_another(model_dir, count=4), 0.0, 1.0, 0.5, 0.75)
    tasks = ["a", "b", "a", "b"]
    group = [
        msgspec.structs.replace(one, rollout=msgspec.structs.replace(one.rollout, task=task))
        for one, task in zip(played, tasks, strict=True)
    ]
    pairs = made(DPO, lr=1e-9, threads=1, device="cpu").examples([group])
    assert [("2", "0"), ("1", "3")] == [(pair.chosen[-1], pair.rejected[-1]) for pair in pairs]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"pairs": "some"}, 'pairs is "some"; write one of extremes'),
        ({"group_size": 1}, "group of 2"),
        ({"beta": 0.0}, "beta is 0.0; write a number above 0"),
        ({"min_gap": 0.0}, "min_gap is 0.0; write a number above 0"),
        ({"optim_decay": "linear"}, "optim.decay = 'linear' falls to 0 at the last update"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(DPO, **params)
