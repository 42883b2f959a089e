"""The KL anchor on calls of agents that share the weights and are not trained."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.errors import ConfigError
from agl.schemas import Weights, pack_ids
from agl_algo_verl.losses.anchor import held_rows
from agl_algo_verl.ray.trainer import RayVERL
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import read_settings
from agl_testing.conformance.bench import AlgorithmBench

from .test_losses import CPU, MICRO, by_torch, by_verl, other, policy, update_of
from .world import OTHERS_ANSWER, OTHERS_QUESTION, SharedWorld, World, config, other_call, scenario

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from agl.schemas import Transition

__all__ = ["other", "policy"]

torch_anchor = pytest.importorskip("agl_algo_torch.learner.anchor", reason="needs agl-algo-torch")
torch_batch = pytest.importorskip("agl_algo_torch.learner.batch", reason="needs agl-algo-torch")


def episode_of(*calls: Transition) -> Any:
    return SimpleNamespace(transitions=calls)


@pytest.mark.parametrize("micro", MICRO)
@pytest.mark.parametrize("keys", [{"loss": "gspo"}, {"actor.clip_ratio_c": 1e9}], ids=["ours", "verls"])
def test_gradient_is_that_of_the_torch_engine(
    keys: dict[str, Any], micro: str, policy: Any, other: Any, model_dir: Path
) -> None:
    update = update_of(policy, other, seed=3)
    settings, _ = read_settings(config(anchor_coef=0.7))
    longer = other_call("a", response_ids=pack_ids([*OTHERS_ANSWER, 63, 64]), temperature=0.5)
    calls = [other_call("a"), longer, other_call("b"), other_call("z", response_ids=pack_ids([9]))]
    held, _ = held_rows([[episode_of(*calls)]], policy="llm", settings=settings)

    class Tuned:
        class reference:  # noqa: N801 - an attribute of the policy that is tuned
            @staticmethod
            @contextmanager
            def active() -> Generator[Any]:
                yield other

    name, params = ("gspo", {}) if "loss" in keys else ("ppo-clip", {"clip_high": 0.2})
    value, gradient = by_torch(update, policy, budget=20, loss=name, loss_params=params)
    anchor = torch_anchor.Anchor(coef=0.7, kl="k3")
    rows = anchor.rows([episode_of(*calls)], policy="llm")
    learner = SimpleNamespace(
        loaded=SimpleNamespace(model=policy),
        batches=partial(torch_batch.micro_batches, token_budget=20, device=CPU),
    )
    policy.zero_grad()
    found = anchor.add_gradient(learner, Tuned, rows, rollouts={"a", "b"})
    expected = {name: gradient[name] + parameter.grad for name, parameter in policy.named_parameters()}
    start = torch_batch.recompute_logprobs(other, rows, token_budget=64, device=CPU)
    held = [replace(row, reference=logp[row.prompt :]) for row, logp in zip(held, start, strict=True)]
    own = [row for row in held if row.rollout in ("a", "b")]
    whole, gradients, metrics = by_verl(update, model_dir, held=own, anchor_coef=0.7, **keys, **MICRO[micro])
    assert found["anchor_kl"] == pytest.approx(metrics["anchor_kl"], abs=1e-6)
    assert value + 0.7 * found["anchor_kl"] == pytest.approx(whole, abs=1e-6)
    for part, values in expected.items():
        torch.testing.assert_close(values, gradients[part], atol=1e-6, rtol=1e-6, msg=part)


def drift(model: Path, start: Path) -> float:
    """Return the change in log-probability of the other agent's answer, in nats per token."""

    def logp(path: Path) -> torch.Tensor:
        ids = torch.tensor([OTHERS_QUESTION + OTHERS_ANSWER])
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits[0].log_softmax(-1)
        return found[len(OTHERS_QUESTION) - 1 : -1].gather(1, torch.tensor(OTHERS_ANSWER)[:, None])[:, 0]

    return float((logp(model) - logp(start)).abs().mean())


def trained(model_dir: Path, workdir: Path, world: World, **keys: Any) -> tuple[Path, list[dict[str, float]], Any]:
    """Return the weights after a few steps, each step's metrics, and the reference that was loaded."""
    bench = AlgorithmBench(scenario(model_dir, world, **keys), workdir)

    async def body() -> tuple[Path, list[dict[str, float]], Any]:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            reports = [await algorithm.step()]
            while not reports[-1].is_finished:
                reports.append(await algorithm.step())
            reference = algorithm._learner._policy._reference
            await algorithm.close()
            weights = bench.published[-1].resource
            assert isinstance(weights, Weights)
            return type(workdir)(weights.uri), [report.metrics for report in reports], reference

    return asyncio.run(body())


@pytest.mark.parametrize("keys", [{}, {"model.lora_rank": 4}, {"algorithm.adv_estimator": "gae"}], ids=str)
def test_other_agents_are_held_without_being_asked_for(keys: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    drifts: dict[str, float] = {}
    settings = {"trainer.total_training_steps": 6, "actor.optim.lr": 1e-2, "rollout.n": 8, **keys}
    for name, params in (("default", {}), ("off", {"anchor_coef": 0.0})):
        found, metrics, _ = trained(model_dir, tmp_path / name, SharedWorld(), **settings, **params)
        drifts[name] = drift(found, model_dir)
        assert (name == "default") == any("anchor_kl" in each for each in metrics)
    assert drifts["default"] < 0.85 * drifts["off"], drifts


@pytest.mark.parametrize(("world", "is_needed"), [(World, False), (SharedWorld, True)])
def test_the_start_is_kept_in_memory_only_where_other_agents_share_the_weights(
    world: Any, is_needed: bool, model_dir: Path, tmp_path: Path
) -> None:
    *_, reference = trained(model_dir, tmp_path, world(), **{"trainer.total_training_steps": 1})
    assert is_needed == (reference is not None)


@pytest.mark.parametrize(
    "changes",
    [{"reject": ""}, {"reject": "error"}, {"policy": "other"}, {"prompt_ids": b""}, {"response_ids": b""}],
    ids=str,
)
def test_other_calls_are_not_held(changes: dict[str, Any]) -> None:
    settings, _ = read_settings(config())
    rows, _ = held_rows([[episode_of(other_call("r"))]], policy="llm", settings=settings)
    assert [len(OTHERS_ANSWER)] == [int(row.held.sum()) for row in rows if row.held is not None]
    assert ([], {}) == held_rows([[episode_of(other_call("r", **changes))]], policy="llm", settings=settings)


def test_calls_beyond_the_lengths_are_counted_and_not_held() -> None:
    settings, _ = read_settings(config(**{"data.max_response_length": 2}))
    found = held_rows([[episode_of(other_call("r"))]], policy="llm", settings=settings)
    assert ([], {"anchor_too_long": 1.0}) == found


def test_weights_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"anchor_coef = -1\.0: Expected"):
        read_settings(config(anchor_coef=-1.0))


ON_RAY = {"rollout.name": "agl_hf", "algorithm.adv_estimator": "gae", "model.lora_rank": 4}


def test_on_ray_a_critic_with_adapters_cannot_have_an_anchor() -> None:
    with pytest.raises(ConfigError, match=r"anchor_coef = 0\.1: with a critic and adapters.*inproc"):
        read_ray_settings(config(anchor_coef=0.1, **ON_RAY))
    read = read_ray_settings(config(**ON_RAY))
    assert (0.0, True) == (read.settings.anchor_coef, "not held near the start" in read.unheld)
    for keys in (ON_RAY | {"model.lora_rank": 0}, ON_RAY | {"algorithm.adv_estimator": "grpo"}):
        assert (0.1, "") == ((found := read_ray_settings(config(**keys))).settings.anchor_coef, found.unheld)


@pytest.mark.parametrize(("agents", "coef", "holds"), [("writer", 0.1, True), ("", 0.1, False), ("writer", 0.0, False)])
def test_on_ray_agents_are_held_where_some_are_left_out(
    agents: str, coef: float, holds: bool, model_dir: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    given = replace(
        scenario(model_dir), agents=agents, policies=lambda _: {"llm": VerlPolicy(name="llm", model=str(model_dir))}
    )

    async def body() -> RayVERL:
        async with AlgorithmBench(given, tmp_path) as bench:
            algorithm = RayVERL(**config(anchor_coef=coef, **{"rollout.name": "agl_hf"}))
            await algorithm.setup(replace(bench.context(), say=told.append))
            return algorithm

    algorithm = asyncio.run(body())
    assert holds == algorithm.read.holds == any("anchor_coef = 0 saves" in text for text in told)
