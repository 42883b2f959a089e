"""VERL's own functions against those of agl-objectives and agl-algo-torch, on random groups of ragged rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_algo_verl.local.models import actor_config
from agl_algo_verl.losses.choice import chosen_estimator
from agl_algo_verl.losses.correction import Correction, corrected
from agl_algo_verl.losses.shaping import gae
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.settings.keys import key_tables
from agl_algo_verl.settings.settings import read_settings
from agl_objectives import aggregation as aggregating
from agl_objectives import contract, kl
from agl_objectives import importance as weighting
from agl_objectives import losses as objective_losses

from .world import config

torch_gae = pytest.importorskip("agl_algo_torch.ppo", reason="needs agl-algo-torch")
torch_critic = pytest.importorskip("agl_algo_torch.learner.critic", reason="needs agl-algo-torch")

PRECISION = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 0.0), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
"""Tolerances for tests in which both packages must give bit-identical numbers in float64."""

CLOSE = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
"""Tolerances for formulas that the tests write out, which add up in another order."""

values = st.integers(-8, 8).map(lambda n: n / 4) | st.floats(-2, 2, width=32)
EXACT = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
"""Estimators whose float64 results equal VERL's bit for bit."""

NAMED = [
    *((name, {"algorithm.adv_estimator": name}) for name in key_tables()["estimators"]),
    ("dr_grpo", {"algorithm.norm_adv_by_std_in_grpo": False}),
]
NAMES = pytest.mark.parametrize(("name", "keys"), NAMED, ids=[name for name, _ in NAMED])


def is_told_apart(group: list[float]) -> bool:
    """Return true if the scores differ by more than the rounding that both packages allow, and VERL does not."""
    return max(group) - min(group) > 1e-3


@NAMES
@PRECISION
@settings(max_examples=20)
@given(groups=st.lists(st.lists(values, min_size=2, max_size=6).filter(is_told_apart), min_size=1, max_size=4))
def test_advantages_are_those_of_verls_functions(
    name: str, keys: dict[str, Any], groups: list[list[float]], dtype: torch.dtype, tolerance: float
) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    scores_S = torch.tensor([score for group in groups for score in group], dtype=dtype)
    group_S = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    read, _ = read_settings(config(**keys))
    theirs = read.algorithm.adv_estimator
    options: dict[str, Any] = {} if read.algorithm.norm_adv_by_std_in_grpo else {"norm_adv_by_std_in_grpo": False}
    greedy_S = scores_S.flip(0) / 2 if name == "remax" else None
    options |= {} if greedy_S is None else {"reward_baselines": greedy_S}
    theirs_S1, _ = get_adv_estimator_fn(theirs)(
        token_level_rewards=scores_S[:, None].clone(),
        response_mask=torch.ones(len(scores_S), 1, dtype=dtype),
        index=group_S.numpy(),
        config=AlgoConfig(adv_estimator=theirs, gamma=1.0),
        **options,
    )
    scores = contract.Scores(scores_S=scores_S, group_S=group_S, tokens_S=torch.ones_like(group_S), baseline_S=greedy_S)
    own_S = chosen_estimator(read).call(scores).found_S
    # VERL's grpo_vectorized takes deviations in float32, as differences of sums; other forms add up in another order.
    allowed = tolerance if name in EXACT else 3e-3 if name == "grpo_vectorized" else max(tolerance, 1e-6)
    assert float((own_S - theirs_S1[:, 0]).abs().max()) <= allowed


rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=7).filter(any), min_size=1, max_size=5)


def pad(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def losses(masks: list[list[bool]], seed: int, dtype: torch.dtype, *, mode: str, dual: float) -> tuple[Any, Any]:
    """Return loss and gradient with respect to the log-probabilities, by agl-algo-torch and by VERL."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(3, len(mask), generator=generator, dtype=torch.float64).to(dtype) for mask in masks]
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    old_B_R = pad([-d[0].abs() for d in draws])
    advantages_B_R = pad([d[1] for d in draws])
    logp_B_R = (old_B_R + 0.6 * pad([d[2] for d in draws])).requires_grad_()
    tokens, rollouts = int(mask_B_R.sum()), len(masks)

    keys = {"actor.loss_agg_mode": mode, "actor.clip_ratio_high": 0.28, "actor.clip_ratio_c": dual}
    verl_config = actor_config(read_settings(config(**keys))[0])
    verl_config.global_batch_info.update(
        dp_size=1, batch_num_tokens=tokens, global_batch_size=rollouts, loss_scale_factor=None
    )
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=old_B_R,
        log_prob=logp_B_R,
        advantages=advantages_B_R,
        response_mask=mask_B_R,
        loss_agg_mode=mode,
        config=verl_config,
    )
    theirs = (loss, torch.autograd.grad(loss, logp_B_R)[0])

    aggregation = {"token-mean": "token", "seq-mean-token-mean": "sequence"}[mode]
    share = [aggregating.token_weight(aggregation, rollout_tokens=sum(mask)) for mask in masks]
    # Padded tensors with weight 0 in the padding, so that sums are taken in VERL's order.
    weight_B_R = torch.tensor(share, dtype=dtype)[:, None] * mask_B_R
    place_B_R = torch.arange(rollouts)[:, None].expand(mask_B_R.shape)
    padded = contract.TokenBatch(
        logp_M=logp_B_R,
        old_M=old_B_R,
        behaviour_M=old_B_R,
        advantages_M=advantages_B_R,
        weight_M=weight_B_R,
        row_M=place_B_R,
        rollout_M=place_B_R,
    )
    terms = objective_losses.PPOClip(clip_dual=dual)(padded)
    own = (weight_B_R * terms.loss_M).sum() / aggregating.update_total(aggregation, tokens=tokens, rollouts=rollouts)
    return (own, torch.autograd.grad(own, logp_B_R)[0]), theirs


@PRECISION
@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31), dual=st.sampled_from([1.5, 3.0, 1e9]))
def test_losses_over_tokens_and_their_gradients_are_the_same_numbers(
    masks: list[list[bool]], seed: int, dual: float, dtype: torch.dtype, tolerance: float
) -> None:
    (own, own_gradient), (theirs, their_gradient) = losses(masks, seed, dtype, mode="token-mean", dual=dual)
    assert abs(own.item() - theirs.item()) <= tolerance
    assert float((own_gradient - their_gradient).abs().max()) <= tolerance


@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_losses_over_rollouts_differ_by_what_verl_adds_to_a_count(masks: list[list[bool]], seed: int) -> None:
    (own, own_gradient), (theirs, their_gradient) = losses(
        masks, seed, torch.float64, mode="seq-mean-token-mean", dual=3.0
    )
    # VERL divides by a row's tokens + 1e-8, which changes each token's part by up to 1e-8 of it.
    torch.testing.assert_close(own_gradient, their_gradient, atol=1e-15, rtol=1.01e-8)
    assert own.item() == pytest.approx(theirs.item(), abs=1e-7)


def draw(masks: list[list[bool]], seed: int, dtype: torch.dtype, *, count: int) -> list[torch.Tensor]:
    """Return `count` padded tensors of normal random numbers, [B, R] each, with 0 in the padding."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, len(mask), generator=generator, dtype=torch.float64).to(dtype) for mask in masks]
    return [pad([part[index] for part in parts]) for index in range(count)]


def sample(mask: list[bool], values: torch.Tensor) -> RowSample:
    """Return a row whose prompt is one token and whose response has this mask."""
    return RowSample(
        rollout="r",
        group=0,
        ids=torch.zeros(len(mask) + 1, dtype=torch.int64),
        mask=torch.tensor(mask),
        advantages=torch.zeros(len(mask)),
        behaviour=torch.zeros(len(mask)),
        temperature=1.0,
        values=values,
    )


@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_generalised_advantages_are_the_same_numbers(
    masks: list[list[bool]], seed: int, gamma: float, lam: float
) -> None:
    values_B_R, rewards_B_R = draw(masks, seed, torch.float64, count=2)
    samples = [sample(mask, values_R[: len(mask)]) for mask, values_R in zip(masks, values_B_R, strict=True)]
    rewards = [rewards_R[: len(mask)] * torch.tensor(mask) for mask, rewards_R in zip(masks, rewards_B_R, strict=True)]
    whitened_B_R, returns_B_R = gae(samples, rewards, gamma=gamma, lam=lam)
    own: list[torch.Tensor] = []
    for row, rewards_R, returns_R in zip(samples, rewards, returns_B_R, strict=True):
        assert row.values is not None
        advantages_N, targets_N = torch_gae.gae(rewards_R[row.mask], row.values[row.mask], gamma=gamma, lam=lam)
        own.append(advantages_N)
        if sum(map(sum, masks)) > 1:  # VERL cannot whiten a single token, and is not asked to
            assert targets_N.tolist() == returns_R[: len(row.mask)][row.mask].tolist()
    flat = torch.cat(own)
    if len(flat) > 1:
        theirs = torch.cat([found[: len(r.mask)][r.mask] for r, found in zip(samples, whitened_B_R, strict=True)])
        deviation = (flat.var() + 1e-8).sqrt()
        # VERL's mean divides by the count + 1e-8, which moves it by up to 1e-8 of it; nearly equal values show that.
        moved = float(1e-8 * flat.mean().abs() / len(flat) / deviation)
        torch.testing.assert_close((flat - flat.mean()) / deviation, theirs, atol=1e-6 + 1.1 * moved, rtol=1e-6)


@PRECISION
@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31), clip=st.sampled_from([0.1, 0.5, 5.0]))
def test_value_losses_and_their_gradients_are_the_same_numbers(
    masks: list[list[bool]], seed: int, clip: float, dtype: torch.dtype, tolerance: float
) -> None:
    from verl.trainer.ppo.core_algos import compute_value_loss

    values_B_R, returns_B_R, old_B_R = draw(masks, seed, dtype, count=3)
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    values_B_R.requires_grad_()
    theirs, _ = compute_value_loss(values_B_R, returns_B_R, old_B_R, mask_B_R, clip, loss_agg_mode="token-mean")
    own = torch_critic.value_loss(
        values_B_R,
        targets_M=returns_B_R,
        old_M=old_B_R,
        weight_M=mask_B_R.to(dtype),
        total=float(mask_B_R.sum()),
        clip=clip,
    )
    assert abs(own.item() - theirs.item()) <= tolerance
    own_gradient, their_gradient = (
        torch.autograd.grad(loss, values_B_R, retain_graph=True)[0] for loss in (own, theirs)
    )
    assert float((own_gradient - their_gradient).abs().max()) <= tolerance


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@PRECISION
@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_kl_estimates_are_the_same_numbers(
    masks: list[list[bool]], seed: int, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    from verl.trainer.ppo.core_algos import kl_penalty

    del tolerance  # there is none
    logp_B_R, reference_B_R = draw(masks, seed, dtype, count=2)  # VERL bounds k3 at 10, which these stay below
    reference_B_R = logp_B_R + reference_B_R.clamp(-2, 2)
    own = kl.kl_estimate(logp_B_R, reference_B_R, kind=kind)
    assert own.tolist() == kl_penalty(logp_B_R, reference_B_R, kind).tolist()


@PRECISION
@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31), cap=st.sampled_from([1.0, 2.0, 5.0]))
def test_truncated_importance_weights_are_the_same_numbers(
    masks: list[list[bool]], seed: int, cap: float, dtype: torch.dtype, tolerance: float
) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    del tolerance  # there is none
    old_B_R, behaviour_B_R = draw(masks, seed, dtype, count=2)
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    theirs, _ = compute_rollout_correction_weights(
        old_B_R - behaviour_B_R, mask_B_R, rollout_is="token", rollout_is_threshold=cap
    )
    own = weighting.Importance(cap=cap).weights(
        old_B_R[mask_B_R], behaviour_B_R[mask_B_R], rollout_M=torch.zeros(int(mask_B_R.sum()), dtype=torch.int64)
    )
    assert own.tolist() == theirs[mask_B_R].tolist()
    for mask, old_R, behaviour_R, theirs_R in zip(masks, old_B_R, behaviour_B_R, theirs, strict=True):
        row = replace(sample(mask, old_R), old=old_R[: len(mask)], behaviour=behaviour_R[: len(mask)])
        (used_row,) = corrected([row], Correction(importance=weighting.Importance(cap=cap)))
        assert used_row.importance is not None
        used = used_row.importance[row.mask]
        assert used.tolist() == theirs_R[: len(mask)][row.mask].tolist()


def policy_loss(mode: str, mask_B_R: torch.Tensor, tensors: list[torch.Tensor], **keys: Any) -> torch.Tensor:
    """Return VERL's loss with the configuration that training would use.

    `tensors` are log-probabilities, old log-probabilities and advantages.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    verl_config = actor_config(read_settings(config(**keys))[0])
    verl_config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask_B_R.sum()), global_batch_size=len(mask_B_R), loss_scale_factor=None
    )
    logp_B_R, old_B_R, advantages_B_R = tensors
    return get_policy_loss_fn(mode)(
        old_log_prob=old_B_R,
        log_prob=logp_B_R,
        advantages=advantages_B_R,
        response_mask=mask_B_R,
        loss_agg_mode="token-mean",
        config=verl_config,
    )[0]


@CLOSE
@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31), low=st.sampled_from([0.1, 0.2]), high=st.sampled_from([0.2, 0.28, 0.4]))
def test_dapos_bounds_and_the_second_bound_are_what_their_papers_say(
    masks: list[list[bool]], seed: int, low: float, high: float, dtype: torch.dtype, tolerance: float
) -> None:
    logp_B_R, old_B_R, advantages_B_R = draw(masks, seed, dtype, count=3)
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    logp_B_R.requires_grad_()
    keys = {"actor.clip_ratio_low": low, "actor.clip_ratio_high": high, "actor.clip_ratio_c": 3.0}
    theirs = policy_loss("vanilla", mask_B_R, [logp_B_R, old_B_R, advantages_B_R], **keys)
    ratio_M, a_M = torch.exp(logp_B_R - old_B_R)[mask_B_R], advantages_B_R[mask_B_R]
    loss_M = torch.maximum(-a_M * ratio_M, -a_M * ratio_M.clamp(1 - low, 1 + high))
    own = torch.where(a_M < 0, torch.minimum(loss_M, -3.0 * a_M), loss_M).mean()
    assert own.item() == pytest.approx(theirs.item(), abs=tolerance, rel=tolerance)
    gradients = [torch.autograd.grad(loss, logp_B_R, retain_graph=True)[0] for loss in (own, theirs)]
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)


@CLOSE
@settings(max_examples=20)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_gspos_ratio_is_that_of_a_row(masks: list[list[bool]], seed: int, dtype: torch.dtype, tolerance: float) -> None:
    logp_B_R, change_B_R, advantages_B_R = draw(masks, seed, dtype, count=3)
    old_B_R = logp_B_R + 0.3 * change_B_R
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    logp_B_R.requires_grad_()
    keys = {"actor.policy_loss.loss_mode": "gspo", "actor.clip_ratio_high": 0.28}
    theirs = policy_loss("gspo", mask_B_R, [logp_B_R, old_B_R, advantages_B_R], **keys)
    # Zheng et al. 2025 (arXiv 2507.18071), equations 5 to 7, with one advantage per token as in GSPO-token.
    total = torch.zeros((), dtype=dtype)
    for logp_R, old_R, a_R, mask_R in zip(logp_B_R, old_B_R, advantages_B_R, mask_B_R, strict=True):
        ratio = torch.exp((logp_R - old_R)[mask_R].mean().detach())
        ratio_M = ratio * torch.exp(logp_R - logp_R.detach())[mask_R]
        total = total + torch.maximum(-a_R[mask_R] * ratio_M, -a_R[mask_R] * ratio_M.clamp(0.8, 1.28)).sum()
    own = total / int(mask_B_R.sum())
    assert own.item() == pytest.approx(theirs.item(), abs=tolerance, rel=tolerance)
    gradients = [torch.autograd.grad(loss, logp_B_R, retain_graph=True)[0] for loss in (own, theirs)]
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)
