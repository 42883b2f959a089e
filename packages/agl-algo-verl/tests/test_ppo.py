"""PPO with VERL's critic: values per token, GAE over the tokens of a row, and a critic that survives a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.errors import ConfigError
from agl.schemas import CallCredit
from agl_algo_verl.losses.shaping import with_values
from agl_algo_verl.rows.rows import PreparedStep, RowSample
from agl_algo_verl.settings.settings import AlgorithmKeys
from agl_testing.conformance import AlgorithmConformance

from .test_inproc import train
from .world import World, scenario

if TYPE_CHECKING:
    from pathlib import Path

PPO: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.lam": 0.95,
    "critic.optim.lr": 1e-2,
    "rollout.n": 2,
}


def row(name: str, *, mask: list[int], values: list[float], calls: tuple[tuple[str, int, int], ...]) -> RowSample:
    count = len(mask)
    return RowSample(
        rollout=name,
        group=0,
        ids=torch.arange(count + 1),
        mask=torch.tensor(mask, dtype=torch.bool),
        advantages=torch.zeros(count),
        behaviour=torch.zeros(count),
        temperature=1.0,
        calls=calls,
        values=torch.tensor(values),
    )


def prepared(rows: list[RowSample], **returns: list[float]) -> PreparedStep:
    credits = tuple(
        tuple(CallCredit(span_id=f"{name}/{i}", value=value, baseline="t") for i, value in enumerate(values))
        for name, values in returns.items()
    )
    return PreparedStep(samples=rows, rollouts=[(name, 0) for name in returns], metrics={}, credits=credits)


def test_returns_of_calls_reach_their_tokens_and_not_what_the_policy_read() -> None:
    # Call 0 writes two tokens, reads one, call 1 writes one; the critic says nothing yet.
    one = row("a", mask=[1, 1, 0, 1], values=[0.0] * 4, calls=(("a/0", 0, 2), ("a/1", 3, 4)))
    two = row("b", mask=[1], values=[0.0], calls=(("b/0", 0, 1),))
    batch = prepared([one, two], a=[3.0, 1.0], b=[2.0])
    shaped = with_values(batch, [one, two], penalty=None, settings=AlgorithmKeys(adv_estimator="gae"))
    assert [[3.0, 3.0, 0.0, 1.0], [2.0]] == [s.returns.tolist() for s in shaped if s.returns is not None]
    whitened = torch.cat([s.advantages[s.mask] for s in shaped])
    assert pytest.approx(0.0, abs=1e-6) == float(whitened.mean())
    assert pytest.approx(1.0, abs=1e-5) == float(whitened.std())


def test_finished_advantages_are_refused() -> None:
    one = row("a", mask=[1], values=[0.0], calls=(("a/0", 0, 1),))
    credits = ((CallCredit(span_id="a/0", value=1.0, baseline="t", is_advantage=True),),)
    batch = PreparedStep(samples=[one], rollouts=[("a", 0)], metrics={}, credits=credits)
    with pytest.raises(ConfigError, match="finished advantages"):
        with_values(batch, [one], penalty=None, settings=AlgorithmKeys(adv_estimator="gae"))


def test_a_single_token_has_nothing_to_be_compared_with() -> None:
    one = row("a", mask=[1], values=[0.5], calls=(("a/0", 0, 1),))
    (shaped,) = with_values(prepared([one], a=[2.0]), [one], penalty=None, settings=AlgorithmKeys(adv_estimator="gae"))
    assert ([0.0], 2.0) == (shaped.advantages.tolist(), float(shaped.returns[0]))  # type: ignore[index]


def test_policy_and_critic_learn(model_dir: Path, tmp_path: Path) -> None:
    keys = {**PPO, "trainer.total_training_steps": 6, "rollout.n": 8, "actor.optim.lr": 2e-2, "actor.ppo_epochs": 2}
    metrics, _ = train(tmp_path, model_dir, **keys)
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.1, [m["reward"] for m in metrics]
    assert metrics[-1]["vf_loss"] < 0.5 * metrics[0]["vf_loss"], [m["vf_loss"] for m in metrics]
    assert {"critic_grad_norm", "vf_clipfrac", "value", "explained_variance"} <= metrics[0].keys()


def test_the_critic_alone_learns_before_the_warm_up_ends(model_dir: Path, tmp_path: Path) -> None:
    keys = {**PPO, "trainer.total_training_steps": 1, "trainer.critic_warmup": 2}
    metrics, weights = train(tmp_path, model_dir, **keys)
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert all(torch.equal(start[name], tensor) for name, tensor in weights.items())
    assert (True, False) == ("vf_loss" in metrics[0], "pg_loss" in metrics[0])


def test_splitting_rollouts_into_rows_keeps_every_token(model_dir: Path, tmp_path: Path) -> None:
    keys = {**PPO, "trainer.total_training_steps": 1, "critic.ppo_micro_batch_size_per_gpu": 3}
    metrics, _ = train(tmp_path, model_dir, World(rows=2), **keys)
    assert (8.0, 4.0) == (metrics[0]["rows"], metrics[0]["rollouts"])
    assert 0 < metrics[0]["critic_grad_norm"]


def test_policy_and_critic_survive_a_restart(model_dir: Path, tmp_path: Path) -> None:
    keys = {**PPO, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1, "critic.ppo_epochs": 2}
    kit = AlgorithmConformance()
    kit.test_resumed_run_does_what_an_uninterrupted_one_does(scenario(model_dir, **keys), tmp_path)
