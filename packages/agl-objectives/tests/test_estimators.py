"""The estimators equal formulas written out by hand, and satisfy common invariants."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl.schemas import CallCredit
from agl_objectives.advantages import call_advantages
from agl_objectives.comparison import Rule, Score, group_relative
from agl_objectives.contract import Scores
from agl_objectives.registry import estimators, find_estimator

OURS = [entry for entry in estimators() if not entry.needs_baseline]
ESTIMATORS = [entry.name for entry in OURS]
GROUPED = [entry.name for entry in OURS if entry.compares == "group"]
DIVIDING = ["grpo", "grpo_passk", "reinforce++", "reinforce++-baseline"]

rewards = st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=6), min_size=1, max_size=5)


def advantages(
    values: list[float],
    estimator: str,
    *,
    rollouts: list[int],
    places: list[int],
    tokens: list[int] | None = None,
) -> list[float]:
    """Return the advantage of every call; `rollouts` has the rollout of each call, and `places` the rollout's group."""
    credits: list[list[CallCredit]] = [[] for _ in range(max(rollouts, default=-1) + 1)]
    groups = [0] * len(credits)
    for number, (value, rollout, place) in enumerate(zip(values, rollouts, places, strict=True)):
        credits[rollout].append(CallCredit(span_id=str(number), value=value, baseline="", role="writer"))
        groups[rollout] = place
    counts = {str(number): count for number, count in enumerate(tokens or [1] * len(values))}
    found = call_advantages(credits, groups=groups, tokens=counts, estimator=find_estimator(estimator).call)
    return [found[rollout][str(number)] for number, rollout in enumerate(rollouts)]


def one_call_each(groups: list[list[float]], estimator: str, *, tokens: list[int] | None = None) -> list[list[float]]:
    """Return the advantages of rollouts with one call each, by group."""
    values = [v for group in groups for v in group]
    places = [g for g, group in enumerate(groups) for _ in group]
    result = advantages(values, estimator, rollouts=list(range(len(values))), places=places, tokens=tokens)
    return [[result.pop(0) for _ in group] for group in groups]


@given(rewards, st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_scores_are_grouped_alike_with_and_without_torch(groups: list[list[float]], estimator: Rule) -> None:
    flat = [(g, v) for g, group in enumerate(groups) for v in group]
    scores = [Score(value=v, group=g, rollout=n, calls=[]) for n, (g, v) in enumerate(flat)]
    found, _ = group_relative(scores, rule=estimator)
    assert found == pytest.approx([a for group in one_call_each(groups, estimator) for a in group], abs=1e-9)


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


@given(rewards, st.data(), st.sampled_from([name for name in ESTIMATORS if name != "opo"]))  # it counts tokens
def test_statistics_count_rollouts_however_often_the_agent_calls(
    groups: list[list[float]], data: st.DataObject, estimator: str
) -> None:
    values, rollouts, places, expected = list[float](), list[int](), list[int](), list[float]()
    plain = one_call_each(groups, estimator)
    rollout = 0
    for g, group in enumerate(groups):
        for i, value in enumerate(group):
            for _ in range(data.draw(st.integers(1, 5), label="calls")):
                values.append(value)
                rollouts.append(rollout)
                places.append(7 * g)
                expected.append(plain[g][i])
            rollout += 1
    actual = advantages(values, estimator, rollouts=rollouts, places=places)
    assert expected == pytest.approx(actual, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator: str) -> None:
    assert one_call_each([[0.1] * 3, [0.1] * 7], estimator) == [[0.0] * 3, [0.0] * 7]


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_of_one_has_no_baseline(estimator: str) -> None:
    assert one_call_each([[1.0], [0.0, 1.0]], estimator)[0] == [0.0]


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_is_not_changed_by_what_happens_in_a_silent_one(estimator: str) -> None:
    alone = one_call_each([[0.0, 1.0, 1.0]], estimator)[0]
    beside = one_call_each([[0.0, 1.0, 1.0], [0.0, 0.0]], estimator)
    assert beside[1] == [0.0, 0.0]
    if estimator not in ("reinforce++-baseline", "gpg"):  # their scale is the batch's, by definition
        assert alone == beside[0]


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_huge_reward_in_one_group_does_not_silence_another(estimator: str) -> None:
    low, high = one_call_each([[0.0, 1.0], [0.0, 1e7]], estimator)[0]
    assert high > 0.0
    assert low < 0.0 or estimator == "grpo_passk"  # where only the best one counts


def test_turn_values_are_compared_with_the_mean_of_rollouts() -> None:
    assert [0.0, 2.0, -1.0] == advantages([1.0, 3.0, 0.0], "dr_grpo", rollouts=[0, 0, 1], places=[0, 0, 0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_turns_of_equal_rollouts_differ_only_where_nothing_is_divided(estimator: str) -> None:
    found = advantages([1.0, 0.0, 0.0, 1.0], estimator, rollouts=[0, 0, 1, 1], places=[0] * 4)
    unit = 0.0 if estimator in DIVIDING else 2.0 if estimator == "max_rl" else 1.0
    assert [0.5 * unit, -0.5 * unit, -0.5 * unit, 0.5 * unit] == found


@given(rewards, st.data())
def test_opo_weighs_the_mean_of_a_group_by_tokens(groups: list[list[float]], data: st.DataObject) -> None:
    flat = [v for group in groups for v in group]
    tokens = data.draw(st.lists(st.integers(1, 50), min_size=len(flat), max_size=len(flat)))
    expected: list[float] = []
    for group in groups:
        own = tokens[len(expected) : len(expected) + len(group)]
        baseline = sum(n * v for n, v in zip(own, group, strict=True)) / sum(own)
        is_silent = max(group) == min(group)
        expected += [0.0 if is_silent else v - baseline for v in group]
    found = [a for group in one_call_each(groups, "opo", tokens=tokens) for a in group]
    assert expected == pytest.approx(found, abs=1e-9)


@given(rewards)
def test_gpg_scales_by_the_share_of_rollouts_that_scored(groups: list[list[float]]) -> None:
    flat = [v for group in groups for v in group]
    share = len(flat) / max(1, sum(v != 0 for v in flat))
    for group, got in zip(groups, one_call_each(groups, "gpg"), strict=True):
        assert [share * (v - statistics.fmean(group)) for v in group] == pytest.approx(got, abs=1e-9)


@given(rewards)
def test_passk_rewards_the_best_of_a_group_by_its_distance_from_the_second(groups: list[list[float]]) -> None:
    for group, got in zip(groups, one_call_each(groups, "grpo_passk"), strict=True):
        second, best = sorted(group)[-2:]
        expected = [0.0] * len(group)
        expected[group.index(best)] = (best - second) / (statistics.stdev(group) + 1e-6)
        assert expected == pytest.approx(got, abs=1e-9)


@given(st.lists(st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=2, max_size=6), min_size=1, max_size=5))
def test_max_rl_divides_by_the_mean_of_the_group(groups: list[list[float]]) -> None:
    for group, got in zip(groups, one_call_each(groups, "max_rl"), strict=True):
        mean = statistics.fmean(group)
        assert [(v - mean) / mean if mean else 0.0 for v in group] == pytest.approx(got, abs=1e-8)


def test_max_rl_is_unbiased_for_the_first_terms_of_the_logarithm() -> None:
    # An answer of one token that is right with p = sigmoid(x): d log pi / dx is 1 - p if right, and -p if wrong.
    p, n, gradient = 0.3, 4, 0.0
    for bits in range(2**n):
        right = [bool(bits >> place & 1) for place in range(n)]
        chance = p ** sum(right) * (1 - p) ** (n - sum(right))
        (found,) = one_call_each([[float(each) for each in right]], "max_rl")
        gradient += chance / n * sum(a * (1 - p if each else -p) for a, each in zip(found, right, strict=True))
    # J = -sum_{k=1..n} (1 - p)^k / k. The group's own mean as a baseline takes its last term away.
    expected = sum((1 - p) ** (k - 1) for k in range(1, n)) * p * (1 - p)
    assert expected == pytest.approx(gradient, abs=1e-8)


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=2, max_size=12), st.integers(1, 4))
def test_rae_subtracts_the_mean_of_the_role_over_all_tasks(games: list[tuple[int, int]], size: int) -> None:
    credits = [
        [
            CallCredit(span_id=role, value=float(value), baseline=f"{n // size}/{role}", role=role)
            for role, value in zip("ab", game, strict=True)
        ]
        for n, game in enumerate(games)
    ]
    groups = [n // size for n in range(len(games))]
    found = call_advantages(credits, groups=groups, tokens={}, estimator=find_estimator("rae").call)
    means = [statistics.fmean(game[player] for game in games) for player in (0, 1)]
    for game, got in zip(games, found, strict=True):
        assert [game[0] - means[0], game[1] - means[1]] == pytest.approx([got["a"], got["b"]], abs=1e-8)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=5))
def test_hierarchical_grpo_compares_attempts_within_a_rollout_and_proposals_across(attempts: list[list[int]]) -> None:
    credits = [
        [
            CallCredit(span_id="p", value=float(max(own)), baseline="proposer", role="proposer"),
            *(CallCredit(span_id=str(n), value=float(v), baseline="solver", role="solver") for n, v in enumerate(own)),
        ]
        for own in attempts
    ]
    groups = [0] * len(attempts)
    found = call_advantages(credits, groups=groups, tokens={}, estimator=find_estimator("hierarchical_grpo").call)
    mean = statistics.fmean(max(own) for own in attempts)
    for own, got in zip(attempts, found, strict=True):
        expected = [max(own) - mean, *(v - statistics.fmean(own) for v in own)]
        assert expected == pytest.approx(list(got.values()), abs=1e-8)


def test_hierarchical_grpo_refuses_a_credit_without_roles() -> None:
    credits = [[CallCredit(span_id="a", value=1.0, baseline="")]]
    with pytest.raises(ConfigError, match=r'\[credit\] use = "role"'):
        call_advantages(credits, groups=[0], tokens={}, estimator=find_estimator("hierarchical_grpo").call)


def test_remax_subtracts_the_greedy_rollout_or_says_that_it_is_missing() -> None:
    remax = find_estimator("remax").call
    scores = torch.tensor([1.0, 0.0])
    given_ = Scores(
        scores_S=scores,
        group_S=torch.zeros(2, dtype=torch.int64),
        tokens_S=torch.ones(2),
        baseline_S=torch.full((2,), 0.25),
    )
    assert [0.75, -0.25] == remax(given_).found_S.tolist()
    with pytest.raises(ConfigError, match="greedy rollout of every task, and none was made"):
        one_call_each([[0.0, 1.0]], "remax")


def test_no_calls_give_no_advantages() -> None:
    assert [{}] == call_advantages([[]], groups=[0], tokens={}, estimator=find_estimator("grpo").call)
