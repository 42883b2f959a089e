"""VERL's advantages and losses against those of agl-algo-torch, on random ragged groups of several calls.

The two packages share no code: one calls `verl.trainer.ppo.core_algos`, the other has its own formulas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.schemas import CallCredit
from agl_algo_verl.advantages import advantages
from agl_algo_verl.opening import actor_config
from agl_algo_verl.settings import Algorithm, read_settings

from .world import config

torch_advantages = pytest.importorskip("agl_algo_torch.advantages", reason="needs agl-algo-torch")
torch_losses = pytest.importorskip("agl_algo_torch.losses", reason="needs agl-algo-torch")

values = st.integers(-8, 8).map(lambda n: n / 4)
same = st.tuples(values, st.integers(1, 4)).map(lambda pair: [pair[0]] * pair[1])
ragged = st.lists(st.lists(st.lists(values, min_size=1, max_size=4), min_size=2, max_size=5), min_size=1, max_size=4)
episodes = st.lists(st.lists(same, min_size=2, max_size=5), min_size=1, max_size=4)

PAIRS = [
    ("grpo", Algorithm(adv_estimator="grpo"), 0.0),
    ("dr_grpo", Algorithm(adv_estimator="grpo", norm_adv_by_std_in_grpo=False), 0.0),
    ("rloo", Algorithm(adv_estimator="rloo"), 0.0),
    # VERL adds 1e-8 to the variance and to the number of values, agl-algo-torch 1e-6 to the deviation.
    ("reinforce++", Algorithm(adv_estimator="reinforce_plus_plus"), 2e-4),
    ("reinforce++-baseline", Algorithm(adv_estimator="reinforce_plus_plus_baseline"), 2e-4),
]


def through_verl(groups: list[list[list[float]]], algorithm: Algorithm) -> list[float]:
    places = [index for index, group in enumerate(groups) for _ in group]
    credits = [
        [CallCredit(span_id=f"{g}/{r}/{c}", value=value, baseline=f"task {g}") for c, value in enumerate(calls)]
        for g, group in enumerate(groups)
        for r, calls in enumerate(group)
    ]
    found = advantages(credits, groups=places, settings=algorithm)
    return [by_span[call.span_id] for calls, by_span in zip(credits, found, strict=True) for call in calls]


def through_torch(groups: list[list[list[float]]], estimator: str) -> list[float]:
    flat = [(g, r, v) for g, group in enumerate(groups) for r, calls in enumerate(group) for v in calls]
    return torch_advantages.estimate(
        torch.tensor([v for _, _, v in flat], dtype=torch.float64),
        rollouts_N=torch.tensor([g * 100 + r for g, r, _ in flat]),
        groups_N=torch.tensor([g for g, _, _ in flat]),
        estimator=estimator,
    ).tolist()


@pytest.mark.parametrize(("name", "algorithm", "tolerance"), PAIRS, ids=[pair[0] for pair in PAIRS])
@settings(max_examples=60, deadline=None)
@given(groups=episodes)
def test_advantages_of_whole_episodes_agree(
    name: str, algorithm: Algorithm, tolerance: float, groups: list[list[list[float]]]
) -> None:
    expected, actual = through_torch(groups, name), through_verl(groups, algorithm)
    assert expected == pytest.approx(actual, rel=tolerance, abs=max(1e-9, tolerance / 100))


@pytest.mark.parametrize(("name", "algorithm", "tolerance"), PAIRS[:3], ids=[pair[0] for pair in PAIRS[:3]])
@settings(max_examples=60, deadline=None)
@given(groups=ragged)
def test_advantages_of_single_calls_agree_where_scores_differ(
    name: str, algorithm: Algorithm, tolerance: float, groups: list[list[list[float]]]
) -> None:
    def differs(group: list[list[float]]) -> bool:
        scores = [sum(calls) / len(calls) for calls in group]
        return max(scores) - min(scores) > 1e-3

    groups = [group for group in groups if differs(group)]
    if groups:
        expected, actual = through_torch(groups, name), through_verl(groups, algorithm)
        assert expected == pytest.approx(actual, rel=tolerance, abs=1e-9)


rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=7).filter(any), min_size=1, max_size=5)


def pad(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def losses(masks: list[list[bool]], seed: int, dtype: torch.dtype, *, mode: str) -> tuple[Any, Any]:
    """The loss and its gradient with respect to the log-probabilities, (agl-algo-torch, VERL)."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(3, len(mask), generator=generator, dtype=torch.float64).to(dtype) for mask in masks]
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    old_B_R = pad([-d[0].abs() for d in draws])
    advantages_B_R = pad([d[1] for d in draws])
    logp_B_R = (old_B_R + 0.3 * pad([d[2] for d in draws])).requires_grad_()
    token_mean = mode == "token-mean"

    # VERL bounds the loss of negative advantages once more, at clip_ratio_c; agl-algo-torch does not.
    keys = {"actor.loss_agg_mode": mode, "actor.clip_ratio_high": 0.28, "actor.clip_ratio_c": 1e9}
    verl_config = actor_config(read_settings(config(**keys))[0])
    verl_config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask_B_R.sum()), global_batch_size=len(masks), loss_scale_factor=None
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

    weight_B_R = torch.zeros_like(old_B_R)
    for index, mask in enumerate(masks):
        weight_B_R[index] = torch_losses.token_weight(
            "token" if token_mean else "sequence",
            rollout_tokens=sum(mask),
            update_tokens=int(mask_B_R.sum()),
            update_rollouts=len(masks),
        )
    own = torch_losses.policy_loss(
        logp_B_R[mask_B_R],
        old_logp_M=old_B_R[mask_B_R],
        advantages_M=advantages_B_R[mask_B_R],
        weight_M=weight_B_R[mask_B_R],
    ).loss
    return (own, torch.autograd.grad(own, logp_B_R)[0]), theirs


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@settings(max_examples=60, deadline=None)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_losses_and_gradients_agree(
    masks: list[list[bool]], seed: int, mode: str, dtype: torch.dtype, tolerance: float
) -> None:
    (own, own_gradient), (theirs, their_gradient) = losses(masks, seed, dtype, mode=mode)
    relative = 1e-8 if mode == "seq-mean-token-mean" else 0.0  # VERL divides by a row's tokens + 1e-8
    assert own.item() == pytest.approx(theirs.item(), abs=tolerance * 10, rel=max(relative, tolerance))
    torch.testing.assert_close(own_gradient, their_gradient, atol=tolerance * 10, rtol=max(relative, tolerance))
