"""Answers that were cut at a limit of tokens: counted in every step, and left out of the loss where asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agl.episodes import EpisodeCredit
from agl.schemas import Episode, Rollout, Weights
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.ppo import PPO
from agl_algo_torch.preparation import prepare
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder

from .token_world import PROMPT, World, episode, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cut(whole: Episode, *, call: int) -> Episode:
    """The episode as if the answer to one call had been cut."""
    calls = list(whole.transitions)
    calls[call] = msgspec.structs.replace(calls[call], finish_reason="length")
    return msgspec.structs.replace(whole, transitions=tuple(calls))


def group() -> list[Episode]:
    rollouts = [Rollout(rollout_id=f"r{i}", task={}, group_id="g", attempt_id=f"r{i}.1") for i in range(2)]
    plain, other = (episode(r, [*PROMPT, 1, 2], [0.0] * 5, float(i), rows=1) for i, r in enumerate(rollouts))
    return [cut(plain, call=1), other]


def test_cut_call_trains_unless_it_is_masked_and_counts_in_the_group_either_way() -> None:
    for mask_truncated, expected in ((False, [[-0.5, -0.5], [0.5, 0.5]]), (True, [[-0.5, 0.0], [0.5, 0.5]])):
        made = prepare([group()], credit=EpisodeCredit(), estimator="dr_grpo", mask_truncated=mask_truncated)
        assert expected == [sample.advantages[3:].tolist() for sample in made.samples]
        assert [2 - mask_truncated, 2] == [sample.trained_tokens for sample in made.samples]


class Cutting(World):
    """Cuts the second call of the first rollout of each group, and gives the first group equal rewards."""

    def play(self, order: RolloutOrder) -> Episode:
        place, number = order.rollout.rollout_id.split("-")[-2:]
        played = msgspec.structs.replace(super().play(order), reward=0.0 if place == "0" else float(number))
        return cut(played, call=1) if number == "0" else played


@pytest.mark.parametrize(("make", "silent"), [(GRPO, 0.25), (PPO, 0.0)])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_step_reports_the_shares_of_cut_dropped_and_silent_rollouts(
    make: Callable[..., Any], silent: float, mask_truncated: bool, model_dir: Path, tmp_path: Path
) -> None:
    scenario = AlgorithmScenario(
        make=lambda: make(
            steps=1, tasks_per_step=4, group_size=4, threads=1, device="cpu", mask_truncated=mask_truncated
        ),
        play=Cutting().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
    )
    (report,) = asyncio.run(run(AlgorithmBench(scenario, tmp_path / "work")))
    shares = {name: value for name, value in report.metrics.items() if name.endswith("_share")}
    groups = 3 if silent else 4  # those that have a gradient: four rollouts of two calls of one token
    assert groups * (8 - mask_truncated) == report.metrics["tokens"]
    assert {"truncated_share": 0.25, "dropped_share": 0.0, "silent_share": silent} == shares
