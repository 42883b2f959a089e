"""The losses, estimators and importance weights of agl-objectives against VERL's, on random ragged rows.

One row is one rollout here, because VERL's sequences are rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agl_algo_verl.local.models import actor_config
from agl_algo_verl.settings.settings import read_settings
from agl_objectives import contract, importance, registry

from .world import config

F64 = torch.float64
rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=7).filter(any), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)

LOSSES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    # our loss, its parameters; VERL's mode, changes of its actor's and of its loss's configuration
    "ppo-clip": ("ppo-clip", {"clip_high": 0.3, "clip_dual": 3.0}, "vanilla", {"clip_ratio_high": 0.3}, {}),
    "gspo": (
        "gspo",
        {"clip_low": 0.1, "clip_high": 0.15},
        "gspo",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
        {},
    ),
    "gmpo": (
        "gmpo",
        {"clip_low": 0.3, "clip_high": 0.4},
        "geo_mean",
        {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
        {},
    ),
    "cispo": ("cispo", {"clip_low": 0.2}, "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, {}),
    "sapo": ("sapo", {"tau_negative": 1.5}, "sapo", {"tau_neg": 1.5}, {}),
    "clip-cov": (
        "clip-cov",
        {"ratio": 1.0, "cov_low": 0.1},
        "clip_cov",
        {},
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1},
    ),
    "kl-cov": ("kl-cov", {"ratio": 0.3, "kl_coef": 0.5}, "kl_cov", {}, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}),
    "dppo-tv": ("dppo", {"clip_low": 0.1}, "dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_c": 20.0}, {}),
    "dppo-kl": (
        "dppo",
        {"divergence": "kl", "clip_low": 0.1},
        "dppo_kl",
        {"clip_ratio_low": 0.1, "clip_ratio_c": 20.0},
        {},
    ),
    "gpg": ("gpg", {}, "gpg", {}, {}),
    "dro": ("dro", {"beta": 0.3}, "dro", {}, {"dro_beta": 0.3}),
}


def pad(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def draw(masks: list[list[bool]], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mask, old log-probabilities, their change, and advantages that are equal within a row; [B, R] each."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(3, len(mask), generator=generator, dtype=F64) for mask in masks]
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    advantages_B_R = pad([part[1, :1].expand(len(part[1])) for part in parts])
    return (
        mask_B_R,
        pad([-part[0].abs() - 0.01 for part in parts]),
        0.6 * pad([part[2] for part in parts]),
        advantages_B_R,
    )


def theirs(mode: str, actor: dict[str, Any], policy_loss: dict[str, Any], *, tensors: dict[str, Any]) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import PolicyLossConfig

    made = replace(
        actor_config(read_settings(config())[0]),
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **actor},
        policy_loss=PolicyLossConfig(loss_mode=mode, **policy_loss),
    )
    mask_B_R = tensors["response_mask"]
    made.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask_B_R.sum()), global_batch_size=len(mask_B_R), loss_scale_factor=None
    )
    return get_policy_loss_fn(mode)(config=made, **tensors)[0]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(masks=rows, seed=seeds)
def test_losses_and_their_gradients_are_those_of_verl(name: str, masks: list[list[bool]], seed: int) -> None:
    ours, params, mode, actor, policy_loss = LOSSES[name]
    assume(
        name != "kl-cov" or len(masks) > 1
    )  # one advantage gives all tokens the same covariance, and any may be taken
    mask_B_R, old_B_R, change_B_R, advantages_B_R = draw(masks, seed)
    logp_B_R = (old_B_R + change_B_R).requires_grad_()
    found = registry.find_loss(ours, params)
    is_sequence = found.entry.aggregation == "sequence"
    tensors = {
        "old_log_prob": old_B_R,
        "log_prob": logp_B_R,
        "advantages": advantages_B_R,
        "response_mask": mask_B_R,
        "loss_agg_mode": "seq-mean-token-mean" if is_sequence else "token-mean",
    }
    expected = theirs(mode, actor, policy_loss, tensors=tensors)

    row_B_R = torch.arange(len(masks))[:, None].expand(mask_B_R.shape)
    weight_B_R = (
        (1.0 / mask_B_R.sum(dim=1, keepdim=True).double()).expand(mask_B_R.shape) if is_sequence else mask_B_R.double()
    )
    tokens = contract.TokenBatch(
        logp_M=logp_B_R[mask_B_R],
        old_M=old_B_R[mask_B_R],
        behaviour_M=old_B_R[mask_B_R],
        advantages_M=advantages_B_R[mask_B_R],
        weight_M=weight_B_R[mask_B_R],
        row_M=row_B_R[mask_B_R],
        rollout_M=row_B_R[mask_B_R],
    )
    terms = found.call(contract.surveyed(found.call, tokens))
    own = (tokens.weight_M * terms.loss_M).sum() / (len(masks) if is_sequence else int(mask_B_R.sum()))
    # VERL adds 1e-8 to the tokens of a row where it divides by them.
    assert own.item() == pytest.approx(expected.item(), abs=1e-7, rel=1e-7)
    gradients = [torch.autograd.grad(loss, logp_B_R, retain_graph=True)[0] for loss in (own, expected)]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", ["opo", "gpg", "grpo_passk", "remax"])
@settings(max_examples=15)
@given(
    groups=st.lists(
        st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=5, unique=True), min_size=1, max_size=4
    ),
    seed=seeds,
)
def test_estimators_are_those_of_verl(name: str, groups: list[list[float]], seed: int) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    scores_S = torch.tensor([score for group in groups for score in group], dtype=F64)
    group_S = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    generator = torch.Generator().manual_seed(seed)
    tokens_S = torch.randint(1, 9, (len(scores_S),), generator=generator)
    baseline_S = torch.randn(len(scores_S), generator=generator, dtype=F64)
    mask_S_R = (torch.arange(8)[None, :] < tokens_S[:, None]).double()
    rewards_S_R = torch.zeros_like(mask_S_R)
    rewards_S_R[torch.arange(len(scores_S)), tokens_S - 1] = scores_S  # at the last token
    options = {"reward_baselines": baseline_S} if name == "remax" else {"index": group_S.numpy()}
    expected_S_R, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards_S_R, response_mask=mask_S_R, config=AlgoConfig(adv_estimator=name), **options
    )
    scores = contract.Scores(scores_S=scores_S, group_S=group_S, tokens_S=tokens_S, baseline_S=baseline_S)
    own_S = registry.find_estimator(name).call(scores).found_S
    np.testing.assert_allclose(own_S.numpy(), expected_S_R[:, 0].numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("floor", [None, 0.5])
@settings(max_examples=15)
@given(masks=rows, seed=seeds)
def test_importance_weights_are_those_of_verl(
    masks: list[list[bool]], seed: int, level: str, floor: float | None
) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    mask_B_R, old_B_R, change_B_R, _ = draw(masks, seed)
    behaviour_B_R = old_B_R - change_B_R
    rollout_B_R = torch.arange(len(masks))[:, None].expand(mask_B_R.shape)
    made = importance.Importance(level=level, mode="truncate" if floor is None else "mask", floor=floor or 0.0)
    own_M = made.weights(old_B_R[mask_B_R], behaviour_B_R[mask_B_R], rollout_M=rollout_B_R[mask_B_R])
    assume(bool((own_M > 0).any()))  # where it drops every token, VERL's metrics divide by zero
    expected_B_R, _ = compute_rollout_correction_weights(
        old_B_R - behaviour_B_R,
        mask_B_R,
        rollout_is=level,
        rollout_is_threshold=2.0 if floor is None else f"{floor}_2.0",
    )
    torch.testing.assert_close(own_M, expected_B_R[mask_B_R], atol=1e-12, rtol=1e-12)
