"""Answers cut at a token limit are counted in every step, and left out of the loss with `mask_truncated`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agl.episodes import EpisodeCredit
from agl.errors import ConfigError
from agl.schemas import Episode, Rollout, Weights, pack_ids
from agl_algo_torch.data.credited_rows import prepare
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.ppo import PPO
from agl_objectives.answers import SoftOverlong
from agl_objectives.estimators import dr_grpo
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder

from .token_world import PROMPT, World, episode, made, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def cut(whole: Episode, *, call: int) -> Episode:
    """Return the episode as if one call had been cut at a limit of tokens."""
    calls = list(whole.transitions)
    calls[call] = msgspec.structs.replace(calls[call], finish_reason="length")
    return msgspec.structs.replace(whole, transitions=tuple(calls))


def group() -> list[Episode]:
    rollouts = [Rollout(rollout_id=f"r{i}", task={}, group_id="g", attempt_id=f"r{i}.1") for i in range(2)]
    plain, other = (episode(r, [*PROMPT, 1, 2], [0.0] * 5, float(i), rows=1) for i, r in enumerate(rollouts))
    return [cut(plain, call=1), other]


def test_cut_call_trains_unless_it_is_masked_and_counts_in_the_group_either_way() -> None:
    for mask_truncated, expected in ((False, [[-0.5, -0.5], [0.5, 0.5]]), (True, [[-0.5, 0.0], [0.5, 0.5]])):
        found = prepare([group()], credit=EpisodeCredit(), estimator=dr_grpo, mask_truncated=mask_truncated)
        assert expected == [sample.advantages[3:].tolist() for sample in found.samples]
        assert [2 - mask_truncated, 2] == [sample.trained_tokens for sample in found.samples]


class Cutting(World):
    """Cuts the second call of the first rollout of each group, and gives the first group equal rewards."""

    def play(self, order: RolloutOrder) -> Episode:
        place, number = order.rollout.rollout_id.split("-")[-2:]
        played = msgspec.structs.replace(super().play(order), reward=0.0 if place == "0" else float(number))
        return cut(played, call=1) if number == "0" else played


@pytest.mark.parametrize(("kind", "silent"), [(GRPO, 0.25), (PPO, 0.0)])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_step_reports_the_shares_of_cut_dropped_and_silent_rollouts(
    kind: Callable[..., Any], silent: float, mask_truncated: bool, model_dir: Path, tmp_path: Path
) -> None:
    scenario = AlgorithmScenario(
        make=lambda: made(
            kind, steps=1, tasks_per_step=4, group_size=4, threads=1, device="cpu", mask_truncated=mask_truncated
        ),
        play=Cutting().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
    )
    (report,) = asyncio.run(run(AlgorithmBench(scenario, tmp_path / "work")))
    shares = {name: value for name, value in report.metrics.items() if name.endswith("_share")}
    groups = 3 if silent else 4  # those that have a gradient: four rollouts of two calls of one token
    assert groups * (8 - mask_truncated) == report.metrics["tokens"]
    assert 1.0 == pytest.approx(shares.pop("effective_share"))
    assert {"truncated_share": 0.25, "dropped_share": 0.0, "silent_share": silent} == shares


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (100, -1.0), (101, -1.0), (900, -1.0)]
)
def test_soft_overlong_punishment_is_that_of_the_paper(tokens: int, expected: float) -> None:
    assert expected == pytest.approx(SoftOverlong(limit=100, buffer=40).punishment(tokens))
    assert 0.0 == SoftOverlong().punishment(tokens)


def test_long_call_loses_reward_and_no_other_call_pays_for_it() -> None:
    whole, other = group()
    calls = [
        msgspec.structs.replace(call, response_ids=pack_ids(range(length)))
        for call, length in zip(whole.transitions, (10, 100), strict=True)
    ]
    long = msgspec.structs.replace(whole, transitions=tuple(calls))
    soft = SoftOverlong(limit=100, buffer=40)
    found = prepare([[long, other]], credit=EpisodeCredit(), estimator=dr_grpo, overlong=soft)
    # The first rollout's values are 0 and -1, its score -1/2; the second's are 1: the mean is 1/4.
    assert [[-0.25, -1.25], [0.75, 0.75]] == [sample.advantages[3:].tolist() for sample in found.samples]


@pytest.mark.parametrize("kind", [GRPO, PPO])
@pytest.mark.parametrize("lengths", [{"overlong_limit": 10}, {"overlong_limit": 10, "overlong_buffer": 11}])
def test_lengths_that_do_not_go_together_are_refused(kind: Callable[..., Any], lengths: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"overlong_limit is 10 and overlong_buffer \d+; give the most tokens"):
        made(kind, **lengths)
