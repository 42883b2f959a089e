"""PPO: advantages by hand, the critic's loss, resuming, and whether the reward rises."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl.schemas import CallCredit, Row, Segment, Weights, pack_floats, pack_ids
from agl_algo_torch import ppo
from agl_algo_torch.learner.batch import from_tokens
from agl_algo_torch.learner.critic import CriticLearner, value_loss
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.ppo import PPO
from agl_objectives.settings import Compute, Lora, Optim
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, mean_reward, published, run

if TYPE_CHECKING:
    from pathlib import Path


def scenario_of(model_dir: Path, world: World | None = None, **params: Any) -> AlgorithmScenario:
    settings = {
        "steps": 3,
        "tasks_per_step": 2,
        "group_size": 4,
        "lr": 3e-3,
        "critic_lr": 3e-3,
        "threads": 1,
        "device": "cpu",
        **params,
    }
    return AlgorithmScenario(
        make=lambda: made(PPO, **settings),
        play=(world or World()).play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        settings = {"epochs": 2, "updates_per_step": 2, "kl_coef": 0.01, "critic_warmup": 1}
        longer = scenario_of(model_dir, **settings, steps=4)
        return replace(scenario_of(model_dir, **settings), make_longer=longer.make)


# peft 0.21 reads an attribute that transformers 5.23 renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_critic_of_an_adapted_policy_trains_adapters_of_its_own_on_the_same_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    settings = LearnerSettings(optim=Optim(), lora=Lora(rank=4), compute=Compute(device="cpu", threads=1))
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    critic = CriticLearner(learner, Optim(lr=1e-2), clip=0.0)
    rows = [from_tokens(f"r{n}", [10 * n, 20, 30 + n, 40], [0, 1, 1, 1]) for n in range(1, 5)]
    targets = [torch.full((4,), float(n % 2)) for n in range(4)]
    before = [logp_T.clone() for logp_T in learner.logprobs(rows)]

    def update() -> float:
        old = critic.values(rows)
        return critic.update(rows, [1.0] * 4, total=12.0, targets=targets, old=old, left=1.0)["value_loss"]

    losses = [update() for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    for expected, found in zip(before, learner.logprobs(rows), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    shared = {p.data_ptr() for p in learner.loaded.model.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in critic.model.parameters() if not p.requires_grad} <= shared

    critic.save(tmp_path, learner, step=1, keep=1)
    again = CriticLearner(learner, Optim(lr=1e-2), clip=0.0)
    again.load(tmp_path, step=1)
    assert all(map(torch.equal, critic.values(rows), again.values(rows)))


@pytest.mark.long
def test_the_reward_rises_and_the_critic_learns_it(model_dir: Path, tmp_path: Path) -> None:
    scenario = scenario_of(model_dir, steps=10, tasks_per_step=8, lr=1e-2, epochs=2)
    bench = AlgorithmBench(scenario, tmp_path / "work")
    reports = asyncio.run(run(bench))
    assert mean_reward(published(bench)) > mean_reward(model_dir) + 0.15, [r.metrics["reward"] for r in reports]
    assert 0.0 == reports[0].metrics["value"]
    assert reports[-1].metrics["reward"] == pytest.approx(reports[-1].metrics["value"], abs=0.3)


def test_silent_groups_are_replaced_and_train_neither_policy_nor_critic(model_dir: Path, tmp_path: Path) -> None:
    number = count()
    world = World(lambda _: float(max(0, next(number) - 4) % 2))  # the first group of four is silent
    bench = AlgorithmBench(scenario_of(model_dir, world, refill=3, steps=1), tmp_path / "work")
    (report,) = asyncio.run(run(bench))
    shown = ("groups_dropped", "rollouts_extra", "rollouts", "rows")
    assert (1.0, 4.0, 12.0, 8.0) == tuple(report.metrics[name] for name in shown)
    assert 8 == len(report.trained)
    assert set(bench.collected) == set(report.uses)


def test_policy_stays_as_it_is_while_the_critic_warms_up(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=2, critic_warmup=2), tmp_path / "work")
    reports = asyncio.run(run(bench))
    assert all("loss" not in report.metrics and report.metrics["value_loss"] > 0 for report in reports)
    assert [] == bench.published


def test_sampler_and_trainer_agree(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=2), tmp_path / "work")
    assert all(report.metrics["logprob_gap"] < 1e-5 for report in asyncio.run(run(bench)))


class Finished:
    """A credit that gives finished advantages."""

    def assign(self, group: Any) -> list[list[CallCredit]]:
        return [
            [CallCredit(span_id=call.span_id, value=1.0, baseline="", is_advantage=True) for call in e.transitions]
            for e in group
        ]


def test_finished_advantages_are_refused(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir), tmp_path / "work", credit=Finished())
    with pytest.raises(ConfigError, match="finished advantages"):
        asyncio.run(run(bench))


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    values = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    d3 = 2.0 - 1.0
    d2 = 1.0 + 0.9 * 1.0 - 0.25
    d1 = 0.0 + 0.9 * 0.25 - 0.5
    a2 = d2 + 0.9 * 0.8 * d3
    a1 = d1 + 0.9 * 0.8 * a2
    found, targets = ppo.gae(rewards, values, gamma=0.9, lam=0.8)
    torch.testing.assert_close(torch.tensor([a1, a2, d3], dtype=torch.float64), found)
    torch.testing.assert_close(found + values, targets)


numbers = st.floats(-5, 5, allow_nan=False, width=32)


@given(st.lists(st.tuples(st.integers(1, 4), numbers, st.integers(0, 3)), min_size=1, max_size=5), st.data())
def test_without_discount_every_token_is_worth_its_calls_return(parts: list[Any], data: st.DataObject) -> None:
    """The row has calls of several tokens, each with a return, and tokens between them that the policy read."""
    place, segments, returns, mask = 1, list[Segment](), dict[str, float](), [0]
    expected: list[float] = []
    for index, (length, value, gap) in enumerate(parts):
        segments.append(Segment(start=place, stop=place + length, span_id=f"s{index}"))
        returns[f"s{index}"] = value
        expected += [value] * length
        mask += [1] * length + [0] * gap
        place += length + gap
    row = Row(
        rollout_id="r",
        attempt_id="a",
        group_id="g",
        branch=0,
        ids=pack_ids([1] * len(mask)),
        mask=bytes(mask),
        logprobs=pack_floats([0.0] * len(mask)),
        segments=tuple(segments),
    )
    steps = torch.tensor(mask, dtype=torch.bool)
    rewards = ppo.call_rewards(row, returns)[steps]
    values = torch.tensor(
        data.draw(st.lists(numbers, min_size=len(rewards), max_size=len(rewards))), dtype=torch.float64
    )
    found, targets = ppo.gae(rewards, values, gamma=1.0, lam=1.0)
    torch.testing.assert_close(torch.tensor(expected, dtype=torch.float64), targets, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(targets - values, found)


def test_value_loss_takes_the_worse_of_clipped_and_free() -> None:
    values, old = torch.tensor([2.0, 0.2]), torch.tensor([0.0, 0.0])
    loss = value_loss(
        values, targets_M=torch.tensor([2.0, 0.2]), old_M=old, weight_M=torch.tensor([1.0, 1.0]), clip=0.5
    )
    assert 0.5 * (0.5 - 2.0) ** 2 == pytest.approx(float(loss))
    free = value_loss(
        values, targets_M=torch.tensor([1.0, 0.2]), old_M=old, weight_M=torch.tensor([0.5, 0.5]), clip=0.0
    )
    assert 0.25 == pytest.approx(float(free))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lam": 1.5}, "gae.lam is 1.5; write a number of at least 0 and of at most 1"),
        ({"kl": "k9"}, 'objective.kl is "k9"; write one of .*k3'),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(PPO, **params)


def test_rewards_that_no_gradient_can_hold_are_skipped(model_dir: Path, tmp_path: Path) -> None:
    world = World(lambda response: 1.7e308 if response[0] >= 128 else -1.7e308)
    bench = AlgorithmBench(scenario_of(model_dir, world), tmp_path / "work")

    reports = asyncio.run(run(bench))

    assert [1.0, 1.0, 1.0] == [report.metrics["updates_nonfinite"] for report in reports]
