"""Losses against formulas in plain Python, and the estimators of KL against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl_algo_torch.losses import (
    entropy,
    kl_estimate,
    policy_loss,
    token_logprobs,
    token_weight,
    truncated_importance,
    update_total,
)

F64 = torch.float64
number = st.floats(-3, 3, allow_nan=False)
token = st.tuples(number, number, number, st.floats(0.01, 1))


def columns(tokens: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=F64) for column in zip(*tokens, strict=True)]


@given(st.lists(token, min_size=1, max_size=8), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_the_clipped_objective_is_the_papers(tokens: list[tuple[float, ...]], low: float, high: float) -> None:
    logp, old, advantage, weight = columns(tokens)
    expected = 0.0
    for new_, old_, a, w in tokens:
        ratio = math.exp(new_ - old_)
        expected += w * -min(a * ratio, a * min(max(ratio, 1 - low), 1 + high))
    result = policy_loss(logp, old_logp_M=old, advantages_M=advantage, weight_M=weight, clip_low=low, clip_high=high)
    assert expected == pytest.approx(float(result.loss), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 1.0, -1.0),
        (1.25, 1.0, -1.25),  # inside the wider upper bound
        (1.29, 1.0, 0.0),  # above it: no further push up
        (1.29, -1.0, 1.29),  # but a push down is always allowed
        (0.85, -1.0, 0.85),
        (0.79, -1.0, 0.0),  # below the lower bound: no further push down
        (0.79, 1.0, -0.79),
    ],
)
def test_the_gradient_vanishes_beyond_the_bounds_in_the_direction_of_the_advantage(
    ratio: float, advantage: float, gradient: float
) -> None:
    logp = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64)
    result = policy_loss(
        logp, old_logp_M=zero, advantages_M=advantage * one, weight_M=one, clip_low=0.2, clip_high=0.28
    )
    result.loss.backward()
    assert gradient == pytest.approx(float(logp.grad), abs=1e-12)
    assert (gradient == 0 and advantage > 0, gradient == 0 and advantage < 0) == (
        result.clipped_high == 1,
        result.clipped_low == 1,
    )


@pytest.mark.parametrize(("ratio", "gradient"), [(2.9, 2.9), (3.1, 0.0)])
def test_the_loss_of_a_negative_advantage_can_be_bounded(ratio: float, gradient: float) -> None:
    logp = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64)
    result = policy_loss(logp, old_logp_M=zero, advantages_M=-one, weight_M=one, clip_dual=3.0)
    result.loss.backward()
    assert (min(ratio, 3.0), gradient) == pytest.approx((result.loss.item(), float(logp.grad)), abs=1e-12)


def test_importance_weights_scale_the_gradient_and_carry_none() -> None:
    old = torch.tensor([-1.0, -1.0], dtype=F64)
    behaviour = torch.tensor([-1.5, -4.0], dtype=F64)
    importance = truncated_importance(old, behaviour, cap=2.0)
    assert [math.exp(0.5), 2.0] == pytest.approx(importance.tolist())
    logp = old.clone().requires_grad_()
    ones = torch.ones(2, dtype=F64)
    policy_loss(logp, old_logp_M=old, advantages_M=ones, weight_M=ones, importance_M=importance).loss.backward()
    assert [-math.exp(0.5), -2.0] == pytest.approx(logp.grad.tolist())


@given(st.lists(st.tuples(number, number), min_size=2, max_size=5))
def test_k1_and_k3_are_unbiased_and_k3_is_never_negative(logits: list[tuple[float, float]]) -> None:
    policy, reference = (column.log_softmax(0) for column in columns(logits))
    exact = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3"):
        estimate = float((policy.exp() * kl_estimate(policy, reference, kind=kind)).sum())
        assert exact == pytest.approx(estimate, abs=1e-12)
    assert bool((kl_estimate(policy, reference, kind="k3") >= -1e-15).all())  # rounding, in VERL's order of terms


@given(st.lists(st.tuples(number, number), min_size=2, max_size=5))
def test_the_gradient_of_k2_is_that_of_the_kl(logits: list[tuple[float, float]]) -> None:
    policy, reference = columns(logits)
    policy.requires_grad_()
    logp, ref = policy.log_softmax(0), reference.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), policy, retain_graph=True)[0]
    expected_k2 = (logp.exp().detach() * kl_estimate(logp, ref, kind="k2")).sum()
    assert exact.tolist() == pytest.approx(torch.autograd.grad(expected_k2, policy)[0].tolist(), abs=1e-12)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 100))
def test_weights_sum_to_what_their_name_says(tokens: list[int], constant: int) -> None:
    total = {
        name: sum(n * token_weight(name, rollout_tokens=n, constant=constant) for n in tokens)
        / update_total(name, tokens=sum(tokens), rollouts=len(tokens))
        for name in ("token", "sequence", "constant")
    }
    assert pytest.approx(total["token"]) == 1.0
    assert pytest.approx(total["sequence"]) == 1.0
    assert sum(tokens) / (constant * len(tokens)) == pytest.approx(total["constant"])


def test_logprobs_are_those_of_the_tempered_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]], dtype=F64)
    actual = token_logprobs(logits, targets_M=torch.tensor([2, 1]), temperature_M=torch.tensor([1.0, 0.5], dtype=F64))
    expected = [
        2.0 - math.log(1 + math.e + math.exp(2)),
        2.0 - math.log(math.exp(6) + math.exp(2) + 1),
    ]
    assert expected == pytest.approx(actual.tolist(), rel=1e-12)


def test_entropy_of_a_uniform_distribution_is_log_of_its_size() -> None:
    assert [math.log(5)] == pytest.approx(entropy(torch.zeros(1, 5)).tolist())


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    one = torch.ones(1)
    with pytest.raises(ConfigError, match=r"'k4' is unknown.*k1, k2, k3"):
        kl_estimate(one, one, kind="k4")
    with pytest.raises(ConfigError, match=r"'mean' is unknown.*token"):
        token_weight("mean", rollout_tokens=1)
