"""KL estimates equal the definition, importance weights equal plain Python, and rollouts have the right shares."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_objectives.aggregation import token_weight, update_total
from agl_objectives.importance import Importance
from agl_objectives.kl import kl_estimate

F64 = torch.float64
number = st.floats(-3, 3, allow_nan=False)


def columns(tokens: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=F64) for column in zip(*tokens, strict=True)]


def weights(logs: list[float], rollouts: list[int], **settings: object) -> list[float]:
    zeros = torch.zeros(len(logs), dtype=F64)
    return (
        Importance(**settings).weights(torch.tensor(logs, dtype=F64), zeros, rollout_M=torch.tensor(rollouts)).tolist()
    )


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


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_k3_is_finite_and_still_pulls_however_far_the_policies_are_apart(dtype: torch.dtype) -> None:
    policy = torch.tensor([-2000.0, -100.0, -30.0, -20.0, -1.0, -0.1], dtype=dtype, requires_grad=True)
    reference = torch.tensor([-0.1, -0.1, -0.1, -0.1, -2.0, -60.0], dtype=dtype)
    found = kl_estimate(policy, reference, kind="k3")
    (slope,) = torch.autograd.grad(found.sum(), policy)
    assert bool(found.isfinite().all() and slope.isfinite().all())
    assert [True] * 4 + [False] * 2 == (slope < 0).tolist()  # towards the reference
    near = (reference - policy.detach())[3:]
    assert torch.equal(torch.exp(near) - near - 1.0, found[3:])
    assert torch.equal(1.0 - torch.exp(near), slope[3:])


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


def test_importance_weights_are_bounded_from_above_per_token() -> None:
    assert [math.exp(0.5), 2.0, math.exp(-9)] == pytest.approx(weights([0.5, 2.5, -9.0], [0, 0, 0], cap=2.0))


def test_importance_weights_carry_no_gradient() -> None:
    old = torch.zeros(1, dtype=F64, requires_grad=True)
    assert not Importance().weights(old, torch.zeros(1, dtype=F64), rollout_M=torch.zeros(1)).requires_grad


def test_weights_of_a_rollout_are_the_product_over_all_its_tokens() -> None:
    assert [math.exp(0.3), 2.0, math.exp(0.3)] == pytest.approx(
        weights([0.1, 5.0, 0.2], [4, 9, 4], level="sequence", cap=2.0)
    )


def test_geometric_weights_of_a_rollout_are_the_mean_of_its_logarithms() -> None:
    assert [math.exp(0.15), 2.0, math.exp(0.15)] == pytest.approx(
        weights([0.1, 5.0, 0.2], [4, 9, 4], level="geometric", cap=2.0)
    )


def test_masked_weights_drop_what_is_beyond_the_bounds_and_keep_the_others_as_they_are() -> None:
    logs = [math.log(0.4), math.log(0.6), math.log(4), math.log(6), 800.0]
    found = weights(logs, [0] * 5, mode="mask", floor=0.5, cap=5.0)
    assert [0.0, 0.6, 4.0, 0.0, 0.0] == pytest.approx(found)


def test_normalised_weights_have_mean_one_over_rollouts_and_not_over_tokens() -> None:
    found = weights([math.log(0.5), math.log(0.5), math.log(0.5), math.log(1.5)], [0, 0, 0, 1], is_normalised=True)
    assert [0.5, 0.5, 0.5, 1.5] == pytest.approx(found)
    assert [0.0] == weights([3.0], [0], mode="mask", is_normalised=True)
