"""KTO: labels, the loss by hand, the gradient against autograd, and whether good tokens become more likely."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.contracts import Recorded
from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.preferences import KTO, Example, Ratio
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, check_gradient, made, mean_reward, paid_by_another, published, run, with_rewards

if TYPE_CHECKING:
    from pathlib import Path

    from agl.schemas import Episode


def scenario_of(model_dir: Path, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 4, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(KTO, **{name: value for name, value in settings.items() if value is not None}),
        play=World().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        settings = {"epochs": 2, "rollouts_per_update": 4}
        longer = scenario_of(model_dir, **settings, steps=4)
        return replace(scenario_of(model_dir, **settings), make_longer=longer.make)


@pytest.mark.long
@pytest.mark.parametrize("params", [{}, {"good_from": 0.5}, {"reference": "behaviour"}])
def test_good_tokens_become_more_likely(model_dir: Path, tmp_path: Path, params: dict[str, Any]) -> None:
    settings = {"steps": 8, "tasks_per_step": 8, "beta": 0.5, **params}
    bench = AlgorithmBench(scenario_of(model_dir, **settings), tmp_path / "work")
    reports = asyncio.run(run(bench))
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.15, [r.metrics["reward"] for r in reports]


def test_rollouts_without_siblings_teach_by_their_own_reward(model_dir: Path, tmp_path: Path) -> None:
    """Rewards of conversations, which are groups of one rollout, teach with `good_from`."""
    alone = [
        replace_group(episode, group=f"conversation-{index}")
        for index, episode in enumerate(paid_by_another(model_dir, count=64))
    ]
    nothing = {"steps": None, "tasks_per_step": None}
    scenario = scenario_of(model_dir, **nothing, good_from=0.5, epochs=8, lr=1e-2)
    bench = AlgorithmBench(scenario, tmp_path / "work", given=Recorded(episodes=tuple(alone)))
    (report,) = asyncio.run(run(bench))
    assert 64 == report.metrics["good"] + report.metrics["bad"]
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.1


def replace_group(episode: Episode, *, group: str) -> Episode:
    from msgspec.structs import replace as with_field

    return with_field(episode, rollout=with_field(episode.rollout, group_id=group))


def labels(model_dir: Path, *rewards: float | None, **params: Any) -> list[tuple[bool, float]]:
    group = with_rewards(paid_by_another(model_dir, count=len(rewards)), *rewards)
    kto = made(KTO, **params)
    return [(bool(label.chosen), label.weight) for label in kto.weighed(kto.examples([group]))]


def test_rollouts_are_compared_with_the_mean_of_their_group(model_dir: Path) -> None:
    assert [(True, 1.0), (False, 1.0)] == labels(model_dir, 1.0, 0.5, 0.0, None)
    assert [] == labels(model_dir, 0.5, 0.5)


def test_rollouts_are_compared_with_the_reward_that_was_set(model_dir: Path) -> None:
    assert [True, True, False] == [is_good for is_good, _ in labels(model_dir, 1.0, 0.5, 0.0, good_from=0.5)]


def test_rarer_kind_counts_for_more(model_dir: Path) -> None:
    rewards = (1.0, 0.0, 0.0, 0.0)
    assert [(True, 2.0), *[(False, pytest.approx(2 / 3))] * 3] == labels(model_dir, *rewards)
    assert [(True, 1.0), *[(False, 1.0)] * 3] == labels(model_dir, *rewards, weights=(1.0, 1.0))
    assert [(True, 3.0), *[(False, 0.5)] * 3] == labels(model_dir, *rewards, weights=(3.0, 0.5))


def test_step_with_one_kind_is_not_balanced(model_dir: Path) -> None:
    assert [(False, 1.0)] * 2 == labels(model_dir, 0.2, 0.1, good_from=0.5)


def test_first_loss_is_a_half(model_dir: Path, tmp_path: Path) -> None:
    (report,) = asyncio.run(run(AlgorithmBench(scenario_of(model_dir, steps=1), tmp_path / "work")))
    assert 0.5 == pytest.approx(report.metrics["loss"], abs=1e-4)
    assert 0.0 == pytest.approx(report.metrics["reference_kl"], abs=1e-3)


@pytest.mark.parametrize("offset", [-3.0, 3.0], ids=["far", "below the reference"])
def test_gradient_equals_that_of_the_whole_loss(model_dir: Path, tmp_path: Path, offset: float) -> None:
    group = with_rewards(paid_by_another(model_dir, count=4, rows=2), 0.0, 1.0, 0.0, 0.0)
    kto = made(KTO, beta=0.7, weights=(1.0, 1.5), lr=1e-9, threads=1, device="cpu", token_budget=12)
    given = kto.weighed(kto.examples([group]))

    def loss(ratios: dict[str, torch.Tensor], tokens: dict[str, int]) -> torch.Tensor:
        del tokens
        point = torch.stack(list(ratios.values())).mean().detach().clamp(min=0)
        each = [
            label.weight * (1 - torch.sigmoid(0.7 * (1 if label.chosen else -1) * (ratios[label.rollouts[0]] - point)))
            for label in given
        ]
        return torch.stack(each).mean()

    bench = AlgorithmBench(scenario_of(model_dir), tmp_path)
    check_gradient(kto, bench, group, given, loss, reference=offset)


def test_loss_of_a_good_and_a_bad_rollout_by_hand() -> None:
    given = [Example(chosen="g"), Example(rejected="b")]
    factors, metrics = made(KTO, beta=1.0).judge(
        given, {"g": Ratio(total=2.0, tokens=1), "b": Ratio(total=0.0, tokens=1)}
    )
    value = 1 / (1 + torch.e**-1.0)  # both are one nat on the right side of the mean
    assert 1 - value == pytest.approx(metrics["loss"])
    assert {"g": value * (1 - value) / 2, "b": -value * (1 - value) / 2} == pytest.approx(factors)
    assert (2.0, 1.0) == (metrics["margin"], metrics["reference_kl"])


def test_single_rollouts_need_a_reward_to_be_compared_with() -> None:
    with pytest.raises(ConfigError, match="Set good_from"):
        made(KTO, group_size=1)
