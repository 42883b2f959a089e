"""The estimators against formulas written out by hand, and the invariants that they share."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl_algo_torch.advantages import ESTIMATORS, estimate

GROUPED = [name for name in ESTIMATORS if name != "reinforce++"]

rewards = st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=6), min_size=1, max_size=5)


def one_call_each(groups: list[list[float]], estimator: str) -> list[list[float]]:
    """Advantages of rollouts that make one call each, by group."""
    values = [v for group in groups for v in group]
    places = [g for g, group in enumerate(groups) for _ in group]
    result = estimate(
        torch.tensor(values, dtype=torch.float64),
        rollouts_N=torch.arange(len(values)),
        groups_N=torch.tensor(places),
        estimator=estimator,
    ).tolist()
    return [[result.pop(0) for _ in group] for group in groups]


@given(rewards)
def test_grpo_subtracts_the_group_mean_and_divides_by_its_deviation(groups: list[list[float]]) -> None:
    expected = []
    for group in groups:
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        expected.append([(v - mean) / (deviation + 1e-6) for v in group])
    for want, got in zip(expected, one_call_each(groups, "grpo"), strict=True):
        assert want == pytest.approx(got, abs=1e-9)


@given(rewards)
def test_rloo_subtracts_the_mean_of_the_others(groups: list[list[float]]) -> None:
    expected = [[v - statistics.fmean(group[:i] + group[i + 1 :]) for i, v in enumerate(group)] for group in groups]
    for want, got in zip(expected, one_call_each(groups, "rloo"), strict=True):
        assert want == pytest.approx(got, abs=1e-9)


@given(rewards)
def test_dr_grpo_only_subtracts_the_group_mean(groups: list[list[float]]) -> None:
    for group, got in zip(groups, one_call_each(groups, "dr_grpo"), strict=True):
        assert [v - statistics.fmean(group) for v in group] == pytest.approx(got, abs=1e-9)


@given(rewards)
def test_reinforce_plus_plus_whitens_over_the_batch(groups: list[list[float]]) -> None:
    every = [v for group in groups for v in group]
    assume(statistics.stdev(every) > 0)
    mean, deviation = statistics.fmean(every), statistics.stdev(every)
    got = [a for group in one_call_each(groups, "reinforce++") for a in group]
    assert [(v - mean) / (deviation**2 + 1e-8) ** 0.5 for v in every] == pytest.approx(got, rel=1e-6, abs=1e-7)


@given(rewards)
def test_reinforce_plus_plus_baseline_scales_by_the_batch_after_the_group_mean(groups: list[list[float]]) -> None:
    centred = [v - statistics.fmean(group) for group in groups for v in group]
    deviation = statistics.stdev(centred)
    got = [a for group in one_call_each(groups, "reinforce++-baseline") for a in group]
    assert [c / (deviation**2 + 1e-8) ** 0.5 for c in centred] == pytest.approx(got, rel=1e-6, abs=1e-7)


@given(rewards, st.data(), st.sampled_from(ESTIMATORS))
def test_statistics_count_rollouts_however_often_the_agent_calls(
    groups: list[list[float]], data: st.DataObject, estimator: str
) -> None:
    values, rollouts, places, expected = [], [], [], []
    plain = one_call_each(groups, estimator)
    for g, group in enumerate(groups):
        for i, value in enumerate(group):
            for _ in range(data.draw(st.integers(1, 5), label="calls")):
                values.append(value)
                rollouts.append(100 * g + i)
                places.append(7 * g)
                expected.append(plain[g][i])
    actual = estimate(
        torch.tensor(values, dtype=torch.float64),
        rollouts_N=torch.tensor(rollouts),
        groups_N=torch.tensor(places),
        estimator=estimator,
    ).tolist()
    assert expected == pytest.approx(actual, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator: str) -> None:
    assert one_call_each([[0.1] * 3, [0.1] * 7], estimator) == [[0.0] * 3, [0.0] * 7]


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_of_one_has_no_baseline(estimator: str) -> None:
    assert one_call_each([[1.0], [0.0, 1.0]], estimator)[0] == [0.0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce++-baseline"])
def test_a_group_is_not_changed_by_what_happens_in_a_silent_one(estimator: str) -> None:
    alone = one_call_each([[0.0, 1.0, 1.0]], estimator)[0]
    beside = one_call_each([[0.0, 1.0, 1.0], [0.0, 0.0]], estimator)
    assert beside[1] == [0.0, 0.0]
    if estimator != "reinforce++-baseline":  # its scale is the batch's, by definition
        assert alone == beside[0]


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_huge_reward_in_one_group_does_not_silence_another(estimator: str) -> None:
    low, high = one_call_each([[0.0, 1.0], [0.0, 1e7]], estimator)[0]
    assert low < 0.0 < high


def test_turn_values_are_compared_with_the_mean_of_rollouts() -> None:
    advantages = estimate(
        torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64),
        rollouts_N=torch.tensor([0, 0, 1]),
        groups_N=torch.tensor([0, 0, 0]),
        estimator="dr_grpo",
    )
    assert advantages.tolist() == [0.0, 2.0, -1.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_turns_of_equal_rollouts_differ_only_where_nothing_is_divided(estimator: str) -> None:
    advantages = estimate(
        torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        rollouts_N=torch.tensor([0, 0, 1, 1]),
        groups_N=torch.tensor([0, 0, 0, 0]),
        estimator=estimator,
    )
    expected = [0.5, -0.5, -0.5, 0.5] if estimator in ("dr_grpo", "rloo") else [0.0] * 4
    assert expected == advantages.tolist()


def test_no_calls_give_no_advantages() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    index = torch.zeros(0, dtype=torch.int64)
    assert len(estimate(empty, rollouts_N=index, groups_N=index)) == 0


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gae' is unknown.*rloo"):
        one_call_each([[0.0, 1.0]], "gae")
