"""Training with VERL in one process, in a world where tokens of a certain kind are rewarded."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.errors import ConfigError
from agl.schemas import LLM, ResourceVersion, Weights
from agl_algo_verl.local.worker import VerlWorker
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.settings.settings import read_settings
from agl_inspect.rollouts.training import token_values
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario, FinishedCredit
from agl_testing.conformance.bench import AlgorithmBench

from .world import World, config, good_tokens, scenario, whole_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def train(
    tmp_path: Path, model_dir: Path, world: World | None = None, **keys: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of each step, and the final weights; if no step published any, those of the start."""
    bench = AlgorithmBench(scenario(model_dir, world, **keys), tmp_path)

    async def body() -> list[dict[str, float]]:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            reports = [await algorithm.step()]
            while not reports[-1].is_finished:
                reports.append(await algorithm.step())
            await algorithm.close()
            return [report.metrics for report in reports]

    metrics = asyncio.run(body())
    weights = bench.published[-1].resource if bench.published else Weights(uri=str(model_dir))
    assert isinstance(weights, Weights)
    return metrics, dict(whole_model(weights).state_dict())


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        keys = {
            "data.train_batch_size": 4,
            "actor.ppo_mini_batch_size": 2,
            "actor.ppo_epochs": 2,
            "actor.optim.lr_scheduler_type": "cosine",
            "actor.optim.lr_warmup_steps": 1,
            "actor.entropy_coeff": 0.001,
        }
        return scenario(model_dir, **keys)


def test_the_reward_rises(model_dir: Path, tmp_path: Path) -> None:
    keys = {"trainer.total_training_steps": 5, "rollout.n": 16, "actor.optim.lr": 2e-2, "actor.ppo_epochs": 2}
    keys |= {"actor.policy_loss.loss_mode": "gspo", "actor.ppo_micro_batch_size_per_gpu": 5}
    metrics, _ = train(tmp_path, model_dir, **keys)
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.12, [m["reward"] for m in metrics]


def test_recomputed_logprobs_agree_with_the_recorded_ones(model_dir: Path, tmp_path: Path) -> None:
    metrics, _ = train(tmp_path / "exact", model_dir, **{"trainer.total_training_steps": 2})
    assert max(m["logprob_gap"] for m in metrics) < 1e-5
    keys = {"actor.fsdp_config.mixed_precision.param_dtype": "bf16", "trainer.total_training_steps": 1}
    half, _ = train(tmp_path / "half", model_dir, **keys)
    assert 1e-5 < max(m["logprob_gap"] for m in half) < 3e-2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_splitting_rollouts_into_rows_changes_no_update(model_dir: Path, tmp_path: Path, mode: str) -> None:
    keys: dict[str, Any] = {"actor.loss_agg_mode": mode, "trainer.total_training_steps": 1}
    keys |= {"actor.loss_scale_factor": 4} if mode.endswith("norm") else {}
    one, whole = train(tmp_path / "1", model_dir, World(rows=1), **keys)
    two, split = train(tmp_path / "2", model_dir, World(rows=2), **keys)
    assert [m["rows"] * 2 for m in one] == [m["rows"] for m in two]
    assert [m["grad_norm"] for m in one] == pytest.approx([m["grad_norm"] for m in two], rel=1e-3)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, split[name], atol=2e-4, rtol=1e-3, msg=f"{mode} {name}")


def test_rows_that_fill_a_micro_batch_change_nothing(model_dir: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"trainer.total_training_steps": 1}
    one, whole = train(tmp_path / "1", model_dir, **keys)
    two, filled = train(tmp_path / "2", model_dir, **keys, **{"actor.ppo_micro_batch_size_per_gpu": 3})
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], abs=1e-6)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, filled[name], atol=1e-4, rtol=1e-3, msg=name)


def test_rows_that_are_too_long_are_counted_and_not_trained(model_dir: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data.max_response_length": 3, "trainer.total_training_steps": 1}
    bench = AlgorithmBench(scenario(model_dir, **keys), tmp_path)

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            return await algorithm.step()

    report = asyncio.run(body())
    assert (0.0, 8.0) == (report.metrics["rows"], report.metrics["rows_response_too_long"])
    assert () == report.published


def test_entropies_are_the_models_own_and_reach_the_uses_of_calls(model_dir: Path, tmp_path: Path) -> None:
    keys = {"trainer.total_training_steps": 1, "algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-2}
    bench = AlgorithmBench(scenario(model_dir, **keys), tmp_path)

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            return await algorithm.step()

    report = asyncio.run(body())
    most = math.log(AutoModelForCausalLM.from_pretrained(model_dir).config.vocab_size)
    trained = [use for uses in report.uses.values() for use in uses if use.row >= 0]
    found = [token_values(use, "entropy") for use in trained]
    every = [value for values in found for value in values if not math.isnan(value)]
    assert all(0 < value <= most + 1e-2 for value in every)
    assert report.metrics["entropy"] == pytest.approx(sum(every) / len(every), abs=2e-3)  # in half precision
    assert all(use.advantage is not None for use in trained)
    assert any("advantage" in use.tokens for use in trained)


def test_entropies_may_be_left_out(model_dir: Path, tmp_path: Path) -> None:
    with_them, whole = train(tmp_path / "with", model_dir, **{"trainer.total_training_steps": 1})
    without, same = train(tmp_path / "without", model_dir, entropy=False, **{"trainer.total_training_steps": 1})
    assert with_them[0].keys() - without[0].keys() == {"entropy"}
    assert all(torch.equal(tensor, same[name]) for name, tensor in whole.items())


def test_entropies_are_those_of_transformers(model_dir: Path) -> None:
    ids = torch.tensor([5, 9, 11, 3, 60, 7])
    blank = torch.zeros(4)
    row = RowSample(rollout="a", group=0, ids=ids, mask=blank == 0, advantages=blank, behaviour=blank, temperature=0.5)
    settings, _ = read_settings(config())
    worker = VerlWorker(origin=Weights(uri=str(model_dir)), settings=settings, steps=1)
    _, entropies = worker.scores([row, replace(row, ids=ids[:4], mask=row.mask[:2])])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(ids[None]).logits[0]
    wanted = torch.distributions.Categorical(logits=logits[1:5] / 0.5).entropy()
    torch.testing.assert_close(entropies[0], wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropies[1], wanted[:2], atol=1e-4, rtol=1e-4)


class Wavering:
    """In some steps, rewards good tokens by position; in the others, gives every rollout the same reward."""

    def __init__(self, *loud: bool, rollouts: int = 8) -> None:
        self._loud, self._rollouts, self._calls = loud, rollouts, 0

    def __call__(self, response: list[int]) -> float:
        step, self._calls = self._calls // self._rollouts, self._calls + 1
        return good_tokens(response) if self._loud[step] else 1.0


def test_a_step_without_a_gradient_changes_and_publishes_nothing(model_dir: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"actor.optim.lr_scheduler_type": "cosine", "trainer.total_training_steps": 4}
    bench = AlgorithmBench(scenario(model_dir, World(Wavering(True, False, False, True)), **keys), tmp_path)

    async def body() -> list[Any]:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            reports = [await algorithm.step() for _ in range(2)]
            state = algorithm.state()
            await algorithm.close()
            again = bench.scenario.make()
            await again.setup(bench.context())
            await again.restore(state)
            return [*reports, await again.step(), await again.step()]

    reports = asyncio.run(body())

    assert [1, 0, 0, 1] == [len(report.published) for report in reports]
    metrics = [report.metrics for report in reports]
    assert [(2.0, 2.0, 1.0)] * 2 == [(m["groups"], m["groups_silent"], m["updates_skipped"]) for m in metrics[1:3]]
    assert not any("grad_norm" in m for m in metrics[1:3])
    # VERL logs the rate of the update to come: the schedule has counted the silent steps too, and is at its end.
    assert metrics[3]["lr"] == pytest.approx(3e-3 * 0.5 * (1 + math.cos(math.pi)), abs=1e-9)


@pytest.mark.parametrize(
    "keys",
    [{"actor.entropy_coeff": 0.01}, {"actor.use_kl_loss": True}, {"loss": "kl-cov", "actor.ppo_epochs": 2}],
    ids=["entropy", "kl", "loss"],
)
def test_a_step_whose_silent_rows_have_a_gradient_all_the_same_trains(
    model_dir: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    metrics, _ = train(tmp_path, model_dir, World(lambda _: 1.0), **keys, **{"trainer.total_training_steps": 1})
    assert "updates_skipped" not in metrics[0]
    assert "grad_norm" in metrics[0]


def test_groups_without_a_difference_are_replaced_in_rounds(model_dir: Path, tmp_path: Path) -> None:
    number = count()
    world = World(lambda _: float(max(0, next(number) - 4) % 2))  # the first group of four is silent
    metrics, _ = train(tmp_path, model_dir, world, **{"sampling.refill": 3, "trainer.total_training_steps": 1})
    shown = ("groups", "groups_silent", "groups_dropped", "rollouts", "rollouts_extra", "rows")
    assert (3.0, 1.0, 1.0, 12.0, 4.0, 8.0) == tuple(metrics[0][name] for name in shown)


def test_importance_weights_are_truncated_where_the_sampler_differs(model_dir: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"trainer.total_training_steps": 1}
    without, _ = train(tmp_path / "off", model_dir, World(bias=-2.0), **keys)
    keys["algorithm.rollout_correction.rollout_is"] = "token"
    corrected, _ = train(tmp_path / "on", model_dir, World(bias=-2.0), **keys)
    assert 2.0 == pytest.approx(corrected[0]["logprob_gap"], abs=1e-3)
    assert corrected[0]["loss"] == pytest.approx(2.0 * without[0]["loss"], abs=1e-5)


def test_weights_of_another_algorithm_are_taken_over(
    make_model: Callable[..., Path], model_dir: Path, tmp_path: Path
) -> None:
    bench = AlgorithmBench(scenario(model_dir), tmp_path)
    other = Weights(uri=str(make_model(seed=5)))

    async def body() -> float:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            bench._live["llm"] = ResourceVersion(name="llm", version="sft-1", resource=other, algorithm="sft")
            return (await algorithm.step()).metrics["logprob_gap"]

    assert asyncio.run(body()) < 1e-5


def test_policies_without_reachable_weights_are_refused(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario(model_dir), tmp_path)
    resource = LLM(endpoint="http://localhost:1/v1", model="m")

    async def body() -> None:
        async with bench:
            bench._live["llm"] = ResourceVersion(name="llm", version="v", resource=resource)
            await bench.scenario.make().setup(bench.context())

    with pytest.raises(ConfigError, match="cannot be trained from here"):
        asyncio.run(body())


def test_credit_of_finished_advantages_is_said_to_leave_the_estimator_nothing(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario(model_dir), tmp_path, credit=FinishedCredit())
    (line,) = [line for line in asyncio.run(bench.said(steps=2)) if "estimator" in line]
    assert 'finished advantages, which estimator = "grpo" does not change' in line
