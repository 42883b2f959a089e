"""KL penalties against the policy at the start, in the loss and in the reward, and adapters in place of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.schemas import CallCredit
from agl_algo_verl.local.kl_control import KlController
from agl_algo_verl.losses.shaping import penalise, with_penalty
from agl_algo_verl.rows.rows import PreparedStep, RowSample
from agl_algo_verl.settings.settings import AlgorithmKeys, KlControlKeys, read_settings
from agl_testing.conformance import AlgorithmConformance

from .test_inproc import train
from .world import World, config, scenario

if TYPE_CHECKING:
    from pathlib import Path

LORA: dict[str, Any] = {"model.lora_rank": 4, "model.lora_alpha": 16, "actor.optim.lr": 3e-2}


def sample(rollout: str, *, old: list[float], reference: list[float], mask: list[int]) -> RowSample:
    count = len(mask)
    return RowSample(
        rollout=rollout,
        group=0,
        ids=torch.arange(count + 1),
        mask=torch.tensor(mask, dtype=torch.bool),
        advantages=torch.zeros(count),
        behaviour=torch.tensor(old),
        temperature=1.0,
        calls=((f"{rollout}/0", 0, count),),
        old=torch.tensor(old),
        reference=torch.tensor(reference),
    )


def test_a_penalty_takes_the_kl_of_all_its_tokens_off_a_rollouts_score() -> None:
    rows = [
        sample("a", old=[-1.0, -1.0], reference=[-2.0, -4.0], mask=[1, 1]),
        sample("b", old=[-1.0, -1.0], reference=[-1.0, -9.0], mask=[1, 0]),
    ]
    keys = {"algorithm.use_kl_in_reward": True, "algorithm.norm_adv_by_std_in_grpo": False}
    settings, _ = read_settings(config(**keys))
    penalty = penalise(rows, settings=settings.algorithm, beta=0.5)
    assert [[-0.5, -1.5], [0.0, 0.0]] == [rewards.tolist() for rewards in penalty.rewards]
    assert pytest.approx(4.0 / 3) == penalty.kl
    credits = tuple((CallCredit(span_id=f"{name}/0", value=1.0, baseline="t"),) for name in "ab")
    prepared = PreparedStep(samples=rows, rollouts=[("a", 0), ("b", 0)], metrics={}, credits=credits)
    shaped = with_penalty(prepared, rows, penalty=penalty, settings=settings)
    assert [[-1.0, -1.0], [1.0, 1.0]] == [row.advantages.tolist() for row in shaped]


def test_an_adaptive_weight_follows_the_kl_and_a_fixed_one_stays() -> None:
    adaptive = KlController(
        AlgorithmKeys(kl_ctrl=KlControlKeys(type="adaptive", kl_coef=0.1, horizon=100, target_kl=0.5))
    )
    adaptive.update(kl=5.0, rollouts=50)
    assert pytest.approx(0.1 * (1 + 0.2 * 50 / 100)) == adaptive.value
    fixed = KlController(AlgorithmKeys(kl_ctrl=KlControlKeys(kl_coef=0.1)))
    fixed.update(kl=5.0, rollouts=50)
    assert 0.1 == fixed.value


def test_a_strong_kl_loss_keeps_the_policy_near_its_start(model_dir: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"trainer.total_training_steps": 4, "actor.ppo_epochs": 2}
    free, far = train(tmp_path / "free", model_dir, **keys)
    kept, near = train(tmp_path / "kept", model_dir, **keys, **{"actor.use_kl_loss": True, "actor.kl_loss_coef": 50.0})
    start = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = torch.tensor([[10, 20, 30]])

    @torch.no_grad()
    def distance(weights: dict[str, torch.Tensor]) -> float:
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        model.load_state_dict(weights)
        first, last = (m(input_ids=ids).logits[0, -1].log_softmax(0) for m in (start, model))
        return float((first.exp() * (first - last)).sum())

    assert distance(near) < 0.7 * distance(far)
    assert "kl_loss" not in free[-1]
    assert 0 < kept[-1]["kl_loss"]


def test_the_kl_in_the_reward_is_measured_from_the_start(model_dir: Path, tmp_path: Path) -> None:
    keys = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.5, "algorithm.kl_penalty": "k3"}
    metrics, _ = train(tmp_path, model_dir, **keys)
    assert pytest.approx(0.0, abs=1e-6) == metrics[0]["reward_kl"]
    assert metrics[1]["reward_kl"] < metrics[2]["reward_kl"]
    assert {0.5} == {m["reward_kl_coef"] for m in metrics}


def test_adapters_reference_and_weight_of_the_penalty_survive_a_restart(model_dir: Path, tmp_path: Path) -> None:
    keys = {
        **LORA,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 10, "target_kl": 0.01},
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.01,
    }
    kit = AlgorithmConformance()
    kit.test_resumed_run_does_what_an_uninterrupted_one_does(scenario(model_dir, **keys), tmp_path)


def test_adapters_learn_and_what_serves_is_what_is_trained(model_dir: Path, tmp_path: Path) -> None:
    metrics, weights = train(tmp_path, model_dir, **LORA)
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert start.keys() == weights.keys()
    changed = {name for name, tensor in weights.items() if not torch.equal(start[name], tensor)}
    assert {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"} <= {name.split(".")[-2] for name in changed}
    assert not {name for name in changed if "norm" in name or "embed" in name or name.endswith("bias")}
    assert max(m["logprob_gap"] for m in metrics) < 1e-5  # what serves is what is trained


def test_adapters_train_the_modules_that_were_named(model_dir: Path, tmp_path: Path) -> None:
    keys = {**LORA, "model.target_modules": ["q_proj"], "trainer.total_training_steps": 1}
    _, weights = train(tmp_path, model_dir, World(), **keys)
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    changed = {name.split(".")[-2] for name, tensor in weights.items() if not torch.equal(start[name], tensor)}
    assert {"q_proj"} == changed
