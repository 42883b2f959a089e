"""IPO: the loss by hand, the gradient against autograd, and whether preferred tokens become more likely."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.preferences import IPO, ipo_loss, make_pairs
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, check_gradient, made, mean_reward, paid_by_another, published, run, with_rewards

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def scenario_of(model_dir: Path, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 4, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(IPO, **settings),
        play=World().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(model_dir, epochs=2, pairs_per_update=2)


@pytest.mark.long
def test_preferred_tokens_become_more_likely(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=8, tasks_per_step=8), tmp_path / "work")
    reports = asyncio.run(run(bench))
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.15, [r.metrics["reward"] for r in reports]


def test_first_loss_is_the_square_of_the_wanted_margin(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=1, beta=0.25), tmp_path / "work")
    (report,) = asyncio.run(run(bench))
    assert 4.0 == pytest.approx(report.metrics["loss"], abs=1e-4)


def test_gradient_equals_that_of_the_whole_loss(model_dir: Path, tmp_path: Path) -> None:
    group = with_rewards(paid_by_another(model_dir, count=4, rows=2), 0.0, 1.0, 2.0, 0.0)
    pairs = make_pairs(group, gap=1e-6, pairing="all")

    def loss(ratios: dict[str, torch.Tensor], tokens: dict[str, int]) -> torch.Tensor:
        value = {name: ratio / tokens[name] for name, ratio in ratios.items()}
        return sum((value[p.chosen] - value[p.rejected] - 1 / (2 * 0.7)) ** 2 for p in pairs) / len(pairs)

    ipo = made(IPO, beta=0.7, lr=1e-9, threads=1, device="cpu", token_budget=12)
    check_gradient(ipo, AlgorithmBench(scenario_of(model_dir), tmp_path), group, pairs, loss)


def test_pair_whose_margin_is_too_large_is_pulled_back() -> None:
    assert (4.0, 4.0) == ipo_loss(-1.0, beta=0.5)
    assert (0.0, 0.0) == ipo_loss(1.0, beta=0.5)
    assert (4.0, -4.0) == ipo_loss(3.0, beta=0.5)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="ipo got group_size = 1"):
        made(IPO, group_size=1)
