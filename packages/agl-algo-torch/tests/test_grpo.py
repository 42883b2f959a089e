"""GRPO as an algorithm, in a world that rewards tokens of one half of the vocabulary."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.contracts import Recorded
from agl.errors import ConfigError
from agl.schemas import CallCredit, ResourceVersion, Rollout, Weights
from agl_algo_torch.data.credited_rows import prepare
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.model import load_model
from agl_objectives.contract import LossTerms, TokenBatch
from agl_objectives.estimators import dr_grpo
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario, FinishedCredit
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import PROMPT, World, episode, made

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import StepReport

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def scenario_of(model_dir: Path, world: World | None = None, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 2, "group_size": 4, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(GRPO, **settings),
        play=(world or World()).play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


async def run(bench: AlgorithmBench) -> list[dict[str, float]]:
    async with bench:
        algorithm = bench.scenario.make()
        await algorithm.setup(bench.context())
        metrics: list[dict[str, float]] = []
        is_finished = False
        while not is_finished:
            report = await algorithm.step()
            metrics.append(report.metrics)
            is_finished = report.is_finished
        await algorithm.close()
        return metrics


def metrics_of(
    tmp_path: Path, model_dir: Path, world: World | None = None, **params: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of every step, and the weights at the end."""
    bench = AlgorithmBench(scenario_of(model_dir, world, **params), tmp_path)
    metrics = asyncio.run(run(bench))
    weights = bench.published[-1].resource
    assert isinstance(weights, Weights)
    if weights.format == "lora":
        return metrics, {}
    return metrics, dict(load_model(weights.uri, device="cpu").model.state_dict())


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return replace(scenario_of(model_dir), make_longer=scenario_of(model_dir, steps=5).make)


@pytest.mark.long
class TestConformanceWithEverything(AlgorithmConformance):
    """Several updates, a KL penalty and adapters must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(model_dir, updates_per_step=2, epochs=2, kl_coef=0.05, lora_rank=4, warmup=2, decay="linear")


@pytest.mark.long
class TestConformanceWithRounds(AlgorithmConformance):
    """Rounds that replace silent groups, and the state of a curriculum, must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        world = World(lambda response: float(response[0] >= 128))
        return scenario_of(model_dir, world, refill=2, curriculum="frontier")


@pytest.mark.parametrize(
    "params",
    [
        {"estimator": "grpo"},
        pytest.param({"estimator": "rloo", "aggregation": "sequence"}, marks=pytest.mark.long),
        pytest.param({"estimator": "reinforce++"}, marks=pytest.mark.long),
        pytest.param({"estimator": "dr_grpo", "aggregation": "constant", "constant_tokens": 2}, marks=pytest.mark.long),
        pytest.param({"estimator": "reinforce++-baseline", "kl_coef": 0.01, "kl": "k2"}, marks=pytest.mark.long),
        {"lora_rank": 8, "lr": 1e-2},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)
def test_the_reward_rises(model_dir: Path, tmp_path: Path, params: dict[str, Any]) -> None:
    metrics, _ = metrics_of(tmp_path / "work", model_dir, **{"steps": 10, "group_size": 8, "lr": 1e-2, **params})
    rewards = [m["reward"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.15, rewards


def test_rollouts_of_a_source_are_trained_as_if_they_were_collected(model_dir: Path, tmp_path: Path) -> None:
    payer = AlgorithmBench(scenario_of(model_dir, steps=1), tmp_path / "payer")
    asyncio.run(run(payer))
    given = Recorded(episodes=tuple(payer.collected.values()), dropped={"stale": 3})
    bench = AlgorithmBench(scenario_of(model_dir, steps=1), tmp_path / "work", given=given)
    (metrics,) = asyncio.run(run(bench))
    assert ({}, 3.0) == (bench.collected, metrics["dropped_stale"])
    own, shared = (load_model(each.published[-1].resource.uri, device="cpu").model for each in (payer, bench))
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), shared.parameters(), strict=True))


def test_source_that_has_nothing_more_ends_the_training(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=9), tmp_path, given=Recorded())
    (metrics,) = asyncio.run(run(bench))
    assert (1.0, []) == (metrics["updates_skipped"], bench.published)


@pytest.mark.parametrize("params", [{"refill": 2}, {"curriculum": "frontier"}, {"estimator": "remax"}])
def test_settings_of_collecting_are_refused_with_a_source(
    model_dir: Path, tmp_path: Path, params: dict[str, Any]
) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, **params), tmp_path, given=Recorded())
    with pytest.raises(ConfigError, match=r"which chose its own tasks, so .* would be ignored"):
        asyncio.run(run(bench))


def test_recomputed_logprobs_agree_with_the_samplers(model_dir: Path, tmp_path: Path) -> None:
    metrics, _ = metrics_of(tmp_path / "work", model_dir)
    assert max(m["logprob_gap"] for m in metrics) < 1e-5
    assert {1.0} == {m["ratio_max"] for m in metrics}


def test_splitting_rollouts_into_rows_changes_no_update(model_dir: Path, tmp_path: Path) -> None:
    for aggregation in ("token", "sequence", "constant"):
        params = {"aggregation": aggregation, "steps": 2, "updates_per_step": 2}
        one, whole = metrics_of(tmp_path / f"{aggregation}-1", model_dir, World(rows=1), **params)
        two, split = metrics_of(tmp_path / f"{aggregation}-2", model_dir, World(rows=2), **params)
        assert [m["rows"] * 2 for m in one] == [m["rows"] for m in two]
        for name, tensor in whole.items():
            torch.testing.assert_close(tensor, split[name], atol=2e-4, rtol=1e-3, msg=f"{aggregation} {name}")


def test_steps_without_a_difference_are_counted_and_publish_nothing(model_dir: Path, tmp_path: Path) -> None:
    number = count()
    world = World(lambda _: float(max(0, next(number) - 16) % 2))  # 8 rollouts a step
    bench = AlgorithmBench(scenario_of(model_dir, world), tmp_path / "work")
    metrics = asyncio.run(run(bench))
    assert [(2.0, 2.0, 1.0)] * 2 == [(m["groups"], m["groups_silent"], m["updates_skipped"]) for m in metrics[:2]]
    assert "updates_skipped" not in metrics[2]
    assert [3] == [version.step for version in bench.published]


def test_silent_groups_are_replaced_and_take_no_part(model_dir: Path, tmp_path: Path) -> None:
    number = count()
    world = World(lambda _: float(max(0, next(number) - 4) % 2))  # the first group of four is silent
    bench = AlgorithmBench(scenario_of(model_dir, world, refill=3, steps=1), tmp_path / "work")
    (metrics,) = asyncio.run(run(bench))
    shown = ("groups", "groups_silent", "groups_dropped", "rollouts", "rollouts_extra", "rows", "silent_share")
    assert (3.0, 1.0, 1.0, 12.0, 4.0, 8.0, pytest.approx(1 / 3)) == tuple(metrics[name] for name in shown)
    assert metrics["reward"] == pytest.approx(4 / 12)


def test_importance_weights_are_truncated_where_the_sampler_differs(model_dir: Path, tmp_path: Path) -> None:
    metrics, _ = metrics_of(tmp_path / "work", model_dir, World(bias=-2.0), steps=1)
    assert (1.0, pytest.approx(2.0, abs=1e-3)) == (metrics[0]["tis_truncated"], metrics[0]["logprob_gap"])
    without, _ = metrics_of(tmp_path / "off", model_dir, World(bias=-2.0), steps=1, correction_cap=0.0)
    assert metrics[0]["loss"] == pytest.approx(2.0 * without[0]["loss"], abs=1e-4)
    assert "tis_truncated" not in without[0]
    assert "effective_share" not in without[0]


def test_later_updates_of_a_step_are_clipped_against_its_start(model_dir: Path, tmp_path: Path) -> None:
    metrics, _ = metrics_of(tmp_path / "work", model_dir, steps=1, epochs=4, lr=2e-2)
    assert metrics[0]["ratio_max"] > 1.05
    assert metrics[0]["clipped_high"] + metrics[0]["clipped_low"] > 0


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.long)])
def test_the_penalty_keeps_the_policy_near_its_start(model_dir: Path, tmp_path: Path, lora_rank: int) -> None:
    params = {"steps": 5, "group_size": 8, "lr": 1e-2, "lora_rank": lora_rank}
    free, _ = metrics_of(tmp_path / "free", model_dir, kl_coef=1e-9, **params)
    held, _ = metrics_of(tmp_path / "held", model_dir, kl_coef=20.0, **params)
    assert 0.0 == pytest.approx(free[0]["kl"], abs=1e-6)
    assert held[-1]["kl"] < 0.5 * free[-1]["kl"]


def test_weights_of_another_algorithm_are_taken_over(model_dir: Path, tmp_path: Path, make_loaded: Any) -> None:
    other = make_loaded(seed=5)
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    bench = AlgorithmBench(scenario_of(model_dir), tmp_path / "work")

    async def body() -> float:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            bench._live["llm"] = ResourceVersion(  # what another algorithm's publish does
                name="llm", version="sft-1", resource=Weights(uri=str(tmp_path / "other")), algorithm="sft"
            )
            return (await algorithm.step()).metrics["logprob_gap"]

    assert asyncio.run(body()) < 1e-5


def test_every_task_is_used_once_before_any_is_used_twice(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=4), tmp_path / "work")
    asyncio.run(run(bench))
    asked = [e.rollout.task["question"] for e in bench.collected.values()]
    assert {f"q{i}": 4 for i in range(8)} == {name: asked.count(name) for name in asked}


class Credit:
    """Gives the reward to the first call, and a finished advantage to the second."""

    def assign(self, group: Any) -> list[list[CallCredit]]:
        return [
            [
                CallCredit(span_id=e.transitions[0].span_id, value=e.reward, baseline="b"),
                CallCredit(span_id=e.transitions[1].span_id, value=7.0, baseline="", is_advantage=True),
            ]
            for e in group
        ]


def test_final_advantages_are_not_normalised_again() -> None:
    rollouts = [Rollout(rollout_id=f"r{i}", task={}, group_id="g", attempt_id=f"r{i}.1") for i in range(2)]
    group = [episode(r, [*PROMPT, 1, 2], [0.0] * 5, float(i), rows=1) for i, r in enumerate(rollouts)]
    prepared = prepare([group], credit=Credit(), estimator=dr_grpo)
    assert [[-0.5, 7.0], [0.5, 7.0]] == [sample.advantages[3:].tolist() for sample in prepared.samples]


def test_credit_of_finished_advantages_is_said_to_leave_the_estimator_nothing(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(
        scenario_of(model_dir, steps=2, estimator="rloo"), tmp_path / "work", credit=FinishedCredit()
    )
    (line,) = [line for line in asyncio.run(bench.said(steps=2)) if "estimator" in line]
    assert 'the credit gave 8 of 16 calls finished advantages, which estimator = "rloo" does not change' in line


def summed(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=-(tokens.advantages_M * tokens.logp_M).sum())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"estimator": "gae"}, "No estimator is named 'gae'.*rloo"),
        ({"loss": f"{__name__}:summed"}, "summed' returned loss_M = .* for 6 trained tokens; return LossTerms"),
        ({"estimator": f"{__name__}:summed"}, "summed' raised AttributeError: .*advantages_M"),
        ({"loss": "gspoo"}, "No loss is named 'gspoo'; did you mean 'gspo'"),
        ({"entropy_coef": -1.0}, "objective.entropy_coef is -1.0; write a number of at least 0"),
        ({"aggregation": "mean"}, 'objective.aggregation is "mean"; write one of .*token'),
        ({"kl": "k1"}, 'objective.kl is "k1"; write one of .*k2, k3'),
        ({"steps": 0}, "steps is 0; write a whole number of at least 1"),
        ({"group_size": 1}, "group_size is 1"),
        ({"loss_params": {"clip_dual": 0.5}}, "clip_dual.*above 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(GRPO, **params)


broken_losses = 0


def breaks(tokens: TokenBatch) -> LossTerms:
    """A loss that is NaN in the next `broken_losses` calls."""
    global broken_losses
    is_broken, broken_losses = broken_losses > 0, broken_losses - 1
    return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M * (float("nan") if is_broken else 1.0))


def test_a_step_without_a_finite_gradient_publishes_nothing_and_the_next_one_trains(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, steps=2, group_size=32, loss=f"{__name__}:breaks"), tmp_path)

    async def steps() -> list[StepReport]:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            monkeypatch.setattr(sys.modules[__name__], "broken_losses", 1)  # from here on; a loss is tried at once
            return [await algorithm.step(), await algorithm.step()]

    first, second = asyncio.run(steps())
    assert first.metrics["updates_nonfinite"] == 1.0
    assert all(math.isfinite(value) for value in first.metrics.values())
    assert first.published == ()
    assert second.published != ()
    assert "updates_nonfinite" not in second.metrics


@pytest.mark.parametrize("params", [{}, {"refill": 1, "curriculum": "frontier"}], ids=["plain", "refill"])
def test_rewards_that_no_gradient_can_hold_are_skipped(model_dir: Path, tmp_path: Path, params: dict[str, Any]) -> None:
    """Such rewards overflow in float32; updates are skipped, and the run goes on."""
    world = World(lambda response: 1e300 if response[0] >= 128 else -1e300)
    bench = AlgorithmBench(scenario_of(model_dir, world, **params), tmp_path)

    metrics = asyncio.run(run(bench))

    assert 3 == len(metrics)
    assert all(m.get("updates_nonfinite") or m.get("updates_skipped") for m in metrics)
    assert [] == bench.published
