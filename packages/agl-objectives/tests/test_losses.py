"""Losses equal the papers' formulas in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl_objectives.contract import Loss, TokenBatch, surveyed
from agl_objectives.registry import find_loss

F64 = torch.float64
number = st.floats(-3, 3, allow_nan=False)
token = st.tuples(number, number, number, st.floats(0.01, 1))


def batch(tokens: list[tuple[float, float, float, float]], *, rollouts: list[int] | None = None) -> TokenBatch:
    """Return tokens from tuples (log pi, log pi_old, A, weight); all are of one rollout by default."""
    logp, old, advantage, weight = (torch.tensor(column, dtype=F64) for column in zip(*tokens, strict=True))
    places = torch.tensor(rollouts or [0] * len(tokens))
    return TokenBatch(
        logp_M=logp.requires_grad_(),
        old_M=old,
        behaviour_M=old,
        advantages_M=advantage,
        weight_M=weight,
        row_M=places,
        rollout_M=places,
    )


def single(ratio: float, advantage: float) -> TokenBatch:
    return batch([(math.log(ratio), 0.0, advantage, 1.0)])


def total(loss: Loss, tokens: TokenBatch) -> torch.Tensor:
    return (tokens.weight_M * loss(surveyed(loss, tokens)).loss_M).sum()


def gradient(loss: Loss, tokens: TokenBatch) -> list[float]:
    (found,) = torch.autograd.grad(total(loss, tokens), tokens.logp_M)
    return found.tolist()


@given(st.lists(token, min_size=1, max_size=8), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_the_clipped_objective_is_the_papers(tokens: list[tuple[float, ...]], low: float, high: float) -> None:
    expected = 0.0
    for new_, old_, a, w in tokens:
        ratio = math.exp(new_ - old_)
        expected += w * -min(a * ratio, a * min(max(ratio, 1 - low), 1 + high))
    loss = find_loss("ppo-clip", {"clip_low": low, "clip_high": high}).call
    assert expected == pytest.approx(float(total(loss, batch(tokens)).detach()), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
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
    ratio: float, advantage: float, expected: float
) -> None:
    loss = find_loss("ppo-clip", {"clip_low": 0.2, "clip_high": 0.28}).call
    assert [expected] == pytest.approx(gradient(loss, single(ratio, advantage)), abs=1e-12)
    clipped = {
        "clipped_low": int(expected == 0 and advantage < 0),
        "clipped_high": int(expected == 0 and advantage > 0),
    }
    assert clipped == loss(single(ratio, advantage)).counts


@pytest.mark.parametrize(("ratio", "expected"), [(2.9, 2.9), (3.1, 0.0)])
def test_the_loss_of_a_negative_advantage_can_be_bounded(ratio: float, expected: float) -> None:
    loss = find_loss("ppo-clip", {"clip_dual": 3.0}).call
    assert min(ratio, 3.0) == pytest.approx(float(total(loss, single(ratio, -1.0)).detach()), abs=1e-12)
    assert [expected] == pytest.approx(gradient(loss, single(ratio, -1.0)), abs=1e-12)


@given(st.lists(token, min_size=1, max_size=8), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_cispo_is_a_policy_gradient_with_bounded_weights(
    tokens: list[tuple[float, ...]], low: float, high: float
) -> None:
    loss = find_loss("cispo", {"clip_low": low, "clip_high": high}).call
    expected = [-w * a * min(max(math.exp(new - old), 1 - low), 1 + high) for new, old, a, w in tokens]
    assert expected == pytest.approx(gradient(loss, batch(tokens)), rel=1e-12, abs=1e-12)


@given(st.lists(token, min_size=1, max_size=8))
def test_sapo_gates_softly_and_harder_where_a_token_is_to_shrink(tokens: list[tuple[float, ...]]) -> None:
    loss = find_loss("sapo", {"tau_positive": 1.0, "tau_negative": 1.5}).call
    expected = 0.0
    for new, old, a, w in tokens:
        tau = 1.0 if a > 0 else 1.5
        expected += w * -a * 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1)))
    assert expected == pytest.approx(float(total(loss, batch(tokens)).detach()), rel=1e-12, abs=1e-12)


def test_at_ratio_one_every_policy_loss_has_the_plain_gradient() -> None:
    tokens = batch([(-1.0, -1.0, 0.5, 0.5), (-2.0, -2.0, 0.5, 0.5)])
    for name in ("ppo-clip", "gspo", "gmpo", "cispo", "sapo", "dppo", "gpg", "dro", "clip-cov"):
        assert [-0.25, -0.25] == pytest.approx(gradient(find_loss(name).call, tokens)), name


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_gspo_takes_one_ratio_over_all_rows_of_a_rollout(advantage: float) -> None:
    changes = [0.1, -0.3, 0.5, 0.7]
    tokens = batch([(-1.0 + c, -1.0, advantage, 0.25) for c in changes])
    ratio = math.exp(sum(changes) / 4)  # 1.284
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.9), 1.1))
    loss = find_loss("gspo", {"clip_low": 0.1, "clip_high": 0.1}).call
    assert expected == pytest.approx(float(total(loss, tokens).detach()))
    slope = 0.0 if advantage > 0 else -advantage * ratio / 4
    assert [slope] * 4 == pytest.approx(gradient(loss, tokens))


def test_gspo_has_the_bounds_of_its_paper() -> None:
    (entry,) = [found.entry for found in [find_loss("gspo")]]
    assert entry.aggregation == "sequence"
    for change, clipped in ((5e-4, 1), (3.5e-4, 0)):
        tokens = batch([(-1.0 + change, -1.0, 1.0, 1.0)])
        loss = find_loss("gspo").call
        assert {"clipped": clipped} == loss(surveyed(loss, tokens)).counts


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_gmpo_takes_the_geometric_mean_of_clipped_ratios(advantage: float) -> None:
    changes = [0.1, -0.9, 0.5]
    tokens = batch([(-1.0 + c, -1.0, advantage, 1 / 3) for c in changes])
    bound = (min(c, 0.4) if advantage > 0 else max(c, -0.4) for c in changes)
    expected = -advantage * math.exp(sum(bound) / 3)
    loss = find_loss("gmpo").call
    assert expected == pytest.approx(float(total(loss, tokens).detach()))
    free = [True, True, False] if advantage > 0 else [True, False, True]
    assert [expected / 3 * f for f in free] == pytest.approx(gradient(loss, tokens))


COVARIANCES = [(-0.1, -0.1, 2.0, 1.0), (-0.2, -0.2, -1.0, 1.0), (-3.0, -3.0, 1.0, 1.0), (-2.0, -2.0, -2.0, 1.0)]
"""Their means are 0 in A and -1.325 in log pi, so their covariances 2.45, -1.125, -1.675 and 1.35."""


def test_clip_cov_takes_the_gradient_of_tokens_within_its_bounds() -> None:
    loss = find_loss("clip-cov", {"ratio": 0.5, "cov_low": 1.0, "cov_high": 2.0}).call
    assert [-2.0, 1.0, -1.0, 0.0] == gradient(loss, batch(COVARIANCES))
    loss = find_loss("clip-cov", {"ratio": 0.5}).call
    assert [0.0, 1.0, -1.0, 0.0] == gradient(loss, batch(COVARIANCES))
    assert {"held_back": 1} == loss(surveyed(find_loss("clip-cov").call, batch(COVARIANCES))).counts


@pytest.mark.parametrize(("name", "field", "value"), [("clip-cov", "kept_M", 0.0), ("kl-cov", "penalised_M", 1.0)])
def test_tokens_of_equal_covariance_are_chosen_in_their_order(name: str, field: str, value: float) -> None:
    many = 100
    only_largest = {"cov_low": 2.0} if name == "clip-cov" else {}
    loss = find_loss(name, {"ratio": 10 / (4 * many), **only_largest}).call
    chosen = surveyed(loss, batch(COVARIANCES * many)).extras[field] == value
    places = [4 * place for place in range(many)]  # of the first kind of token, whose covariance is the largest
    expected = places[:: many // 10] if name == "clip-cov" else places[:10]
    assert expected == chosen.nonzero()[:, 0].tolist()


def test_kl_cov_penalises_the_tokens_of_the_largest_covariance() -> None:
    moved = [(new + 0.01, old, a, w) for new, old, a, w in COVARIANCES]
    loss = find_loss("kl-cov", {"ratio": 0.25, "kl_coef": 0.5}).call
    ratio = math.exp(0.01)
    assert [-2.0 * ratio + 0.5, ratio, -ratio, 2.0 * ratio] == pytest.approx(gradient(loss, batch(moved)))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@given(st.lists(token, min_size=1, max_size=8))
def test_dppo_masks_tokens_that_left_the_trust_region_in_the_direction_of_the_advantage(
    divergence: str, tokens: list[tuple[float, ...]]
) -> None:
    tokens = [(-abs(new) - 0.01, -abs(old) - 0.01, a, w) for new, old, a, w in tokens]
    expected: list[float] = []
    for new, old, a, w in tokens:
        p, q = math.exp(new), math.exp(old)
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        distance = abs(p - q) if divergence == "tv" else kl
        has_left = distance > 0.05 and (p > q if a > 0 else p < q)
        expected.append(0.0 if has_left else -w * a * min(p / q, 20.0))
    loss = find_loss("dppo", {"divergence": divergence, "clip_low": 0.05, "clip_high": 0.05}).call
    assert expected == pytest.approx(gradient(loss, batch(tokens)), rel=1e-9, abs=1e-12)


@given(st.lists(token, min_size=1, max_size=8))
def test_gpg_is_the_plain_policy_gradient_and_dro_adds_a_quadratic_bound(tokens: list[tuple[float, ...]]) -> None:
    plain = [-w * a for _, _, a, w in tokens]
    assert plain == pytest.approx(gradient(find_loss("gpg").call, batch(tokens)))
    bound = [w * (0.3 * (new - old) - a) for new, old, a, w in tokens]
    assert bound == pytest.approx(gradient(find_loss("dro", {"beta": 0.3}).call, batch(tokens)))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ppo-clip", {"clip_dual": 0.5}, "ppo-clip got .*clip_dual.*above 1"),
        ("ppo-clip", {"clip_low": -0.1}, "at least 0"),
        ("sapo", {"tau_negative": 0.0}, "above 0"),
        ("dppo", {"divergence": "js"}, "divergence is .*; write one of|use tv or kl"),
        ("dro", {"beta": -1.0}, "above 0"),
        ("kl-cov", {"ratio": 0.0}, "above 0"),
    ],
)
def test_values_that_make_no_sense_are_refused(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_loss(name, params)
