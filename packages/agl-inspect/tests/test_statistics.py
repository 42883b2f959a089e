"""Comparisons of rewards by the gate, and intervals of means."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import Gate
from agl.errors import ConfigError
from agl_inspect.statistics import compare, compare_tasks, comparison_of, interval, student_cdf, student_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 1, 12.7062), (0.975, 10, 2.22814), (0.95, 5, 2.01505), (0.995, 30, 2.74999), (0.975, math.inf, 1.95996)],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: float, expected: float) -> None:
    assert expected == pytest.approx(student_quantile(probability, freedom), abs=1e-4)


@given(st.floats(0.01, 0.99), st.floats(1.0, 200.0))
def test_quantile_inverts_the_distribution(probability: float, freedom: float) -> None:
    assert probability == pytest.approx(student_cdf(student_quantile(probability, freedom), freedom), abs=1e-6)


def test_students_interval_of_a_textbook_case() -> None:
    """Variance 2.5 over 5 values: t with 4 degrees of freedom, standard error sqrt(0.5)."""
    ends = interval([2, 3, 4, 5, 6])

    width = 2.77645 * math.sqrt(0.5)
    assert (pytest.approx(4 - width, abs=1e-4), pytest.approx(4 + width, abs=1e-4)) == ends


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_interval_of_rewards_between_0_and_1_stays_there_and_holds_their_mean(rewards: list[float]) -> None:
    low, high = interval(rewards)

    assert 0 <= low <= fmean(rewards) + 1e-9
    assert fmean(rewards) - 1e-9 <= high <= 1
    assert low < high


def test_interval_of_equal_rewards_is_that_of_wilson() -> None:
    assert (0.7719, 1.0) == tuple(round(end, 4) for end in interval([1.0] * 13))


def test_comparison_gives_each_direction_half_of_the_error() -> None:
    gate = Gate(error=0.05)
    for _ in range(8):
        gate.update(0.0, 1.0)

    found = compare([0.0] * 8, [1.0] * 8, error=0.05)

    assert found == comparison_of(gate, means=(0.0, 1.0), counts=(8, 8))
    assert ("better", 20, gate.evidence, gate.lower) == (found.verdict, found.threshold, found.evidence, found.low)


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, "better"), (0.4, "undecidable")])
def test_version_is_better_if_its_gain_exceeds_the_wanted_one(gain: float, verdict: str) -> None:
    old, new = [0.1] * 60, [0.5] * 60

    assert (verdict, "worse") == (compare(old, new, gain=gain).verdict, compare(new, old, gain=gain).verdict)


def test_rewards_without_a_partner_are_left_out() -> None:
    found = compare([0.0, 1.0, 1.0, 1.0], [0.5, 0.75])

    assert (2, 2, 2, 0.125) == (found.pairs, found.old_count, found.new_count, found.difference)


def test_task_enters_once_by_the_mean_of_its_rewards() -> None:
    old = {"a": [0.1, 0.3], "b": [0.6], "c": [0.1]}
    new = {"c": [0.4], "b": [0.8], "a": [0.3], "d": [0.0]}

    found = compare_tasks(old, new)

    assert (3, 3, 4, 3) == (found.pairs, found.paired_tasks, found.old_count, found.new_count)
    assert (pytest.approx(0.2), pytest.approx(1.5 / 0.9)) == (found.difference, found.policy_improvement_ratio)
    same = compare([0.2, 0.6, 0.1], [0.3, 0.8, 0.4])
    assert (same.evidence, same.low, same.high) == (found.evidence, found.low, found.high)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30), st.randoms())
def test_order_of_tasks_does_not_change_a_comparison(pairs: list[tuple[float, float]], chance: random.Random) -> None:
    rewards = {str(number): pair for number, pair in enumerate(pairs)}
    shuffled = dict(chance.sample(list(rewards.items()), len(rewards)))

    one, other = (
        compare_tasks(*({task: [pair[at]] for task, pair in each.items()} for at in (0, 1)))
        for each in (rewards, shuffled)
    )

    assert one.verdict == other.verdict
    assert [one.evidence, one.low, one.high] == pytest.approx([other.evidence, other.low, other.high], abs=2e-5)


def test_rewards_outside_0_and_1_span_the_range_that_was_seen() -> None:
    old, new = [0.0, 1.0] * 20, [0.5, 1.0] * 20

    plain, wide = compare(old, new), compare([10 * each for each in old], [10 * each for each in new])

    assert (plain.evidence, pytest.approx(10 * plain.low)) == (wide.evidence, wide.low)
    assert compare(old, new).evidence > compare(old, new, span=2.0).evidence
    assert (0.0, 1.0) == (compare([7.0], [7.0]).difference, compare([7.0], [7.0]).policy_improvement_ratio)


def test_ratio_to_a_mean_that_is_not_above_0_is_unknown() -> None:
    found = compare([-2.0, -1.0], [1.0, 2.0])

    assert (None, True) == (found.policy_improvement_ratio, "policy_improvement_ratio" not in found.words)


@pytest.mark.parametrize(("old", "new"), [([], [1.0]), ([1.0], [])])
def test_comparison_needs_rewards_of_both_versions(old: list[float], new: list[float]) -> None:
    with pytest.raises(ConfigError, match="needs one of each"):
        compare(old, new)
    with pytest.raises(ConfigError, match="no task in common"):
        compare_tasks({"a": [0.5]}, {"b": [0.5]})


def test_words_say_how_strong_the_evidence_is_and_how_much_is_missing() -> None:
    few, many = compare([0.0] * 4, [1.0] * 4), compare([0.0] * 10, [1.0] * 10)
    same = compare_tasks({"a": [0.5], "b": [0.5]}, {"a": [0.5], "b": [0.5]})

    assert few.words.startswith("cannot be told apart, evidence 3.7 to 1 for the new version, 40 to 1 needed: ")
    assert few.words.endswith(" 4 and 4 rollouts; about 9 pairs would do")
    assert many.words.startswith("better, evidence 77 to 1: difference +1.0000 [")
    assert compare([1.0] * 10, [0.0] * 10).words.startswith("worse, evidence 77 to 1: difference -1.0000 [")
    assert same.words.endswith("paired by 2 tasks, 2 and 2 rollouts; more of the same would not do")
