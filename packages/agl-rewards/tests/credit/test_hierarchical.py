"""Hierarchical credit: the paper's formula with numbers that can be checked by hand."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl import CreditEntry, PluginManager
from agl.errors import ConfigError
from agl.schemas import Episode, Rollout, Transition
from agl_rewards.credit.hierarchical import HierarchicalCredit
from agl_testing.conformance import CreditConformance


class TestHierarchicalConformance(CreditConformance):
    is_per_episode = False

    @pytest.fixture
    def credit(self):
        return HierarchicalCredit()


def test_choices_of_one_request_are_one_step_where_one_of_them_is_rejected():
    choices = [
        Transition(rollout_id="one", attempt_id="one.1", span_id=f"one-{i}", agent="w", prompt_ids=b"s", reject=reject)
        for i, reject in enumerate(["", "missing_token_ids", ""])
    ]
    one = msgspec.structs.replace(episode("one", 1.0, []), transitions=tuple(choices))
    found = HierarchicalCredit(gamma=0.5, norm="none").assign([one, episode("two", 0.0, ["s"], agent="w")])
    close([[1.0, 1.0], [-1.0]], values(found))


def episode(name, reward, states, *, agent="walker", rewards=None):
    """Return an episode with one state per turn."""
    calls = tuple(
        Transition(
            rollout_id=name,
            attempt_id=f"{name}.1",
            span_id=f"{name}-{turn}",
            agent=agent,
            turn=turn,
            prompt_ids=state.encode(),
            reward=None if rewards is None else rewards[turn],
        )
        for turn, state in enumerate(states)
    )
    return Episode(
        rollout=Rollout(rollout_id=name, task={}, group_id="g"), attempt=None, reward=reward, transitions=calls
    )


def values(credits):
    return [[credit.value for credit in calls] for calls in credits]


def close(expected, found):
    assert [len(row) for row in expected] == [len(row) for row in found]
    for expected_row, row in zip(expected, found, strict=True):
        for one, other in zip(expected_row, row, strict=True):
            assert math.isclose(one, other, abs_tol=1e-9)


def test_both_levels_are_added_with_omega():
    group = [episode("one", 1.0, ["start", "left"]), episode("two", 0.0, ["start", "right"])]
    found = HierarchicalCredit(omega=0.5, gamma=0.5, norm="none").assign(group)
    # Episodes: 1 and 0 around 0.5. "start": returns 0.5 and 0 around 0.25. "left" and "right" were reached once each.
    close([[0.5 + 0.5 * 0.25, 0.5], [-0.5 - 0.5 * 0.25, -0.5]], values(found))


def test_deviations_scale_both_levels():
    group = [episode("one", 3.0, ["s"]), episode("two", 1.0, ["s"]), episode("three", 2.0, ["s"])]
    close([[2.0], [-2.0], [0.0]], values(HierarchicalCredit().assign(group)))


def test_a_rollout_that_comes_back_to_a_state_counts_once():
    group = [episode("one", 1.0, ["s", "s", "s"]), episode("two", 0.0, ["s"])]
    found = HierarchicalCredit(gamma=1.0, norm="none").assign(group)
    close([[1.0, 1.0, 1.0], [-1.0]], values(found))


def test_turns_can_stand_for_states():
    group = [episode("one", 1.0, ["a", "b"]), episode("two", 0.0, ["c", "d"])]
    by_prompt = HierarchicalCredit(gamma=1.0, norm="none").assign(group)
    by_turn = HierarchicalCredit(gamma=1.0, norm="none", state="turn").assign(group)
    close([[0.5, 0.5], [-0.5, -0.5]], values(by_prompt))
    close([[1.0, 1.0], [-1.0, -1.0]], values(by_turn))


def test_states_of_different_agents_are_different():
    group = [episode("one", 1.0, ["s"], agent="writer"), episode("two", 0.0, ["s"], agent="checker")]
    close([[0.5], [-0.5]], values(HierarchicalCredit(norm="none").assign(group)))


def test_rewards_of_turns_count_for_the_episode_and_the_steps_before_them():
    group = [
        episode("one", 0.0, ["s", "t"], rewards=[None, 1.0]),
        episode("two", 0.0, ["s", "t"], rewards=[None, None]),
    ]
    found = HierarchicalCredit(gamma=0.5, norm="none").assign(group)
    close([[0.5 + 0.25, 0.5 + 0.5], [-0.5 - 0.25, -0.5 - 0.5]], values(found))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(-5, 5), st.lists(st.sampled_from("xyz"), min_size=1, max_size=4)), max_size=6))
def test_episode_advantages_alone_sum_to_zero_and_ignore_the_number_of_calls(runs):
    group = [episode(f"r{index}", reward, states) for index, (reward, states) in enumerate(runs)]
    found = values(HierarchicalCredit(omega=0.0, norm="none").assign(group))
    assert all(len(set(row)) == 1 for row in found)
    assert math.isclose(0.0, math.fsum(row[0] for row in found), abs_tol=1e-9)


def test_advantages_are_final():
    (credits,) = HierarchicalCredit().assign([episode("one", 1.0, ["s"])])
    assert [(0.0, True)] == [(credit.value, credit.is_advantage) for credit in credits]


@pytest.mark.parametrize("settings", [{"omega": -1.0}, {"gamma": 2.0}, {"state": "room"}, {"norm": "max"}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=f": {next(iter(settings))} is .*; write "):
        PluginManager().build(
            CreditEntry(name="hierarchical", factory=HierarchicalCredit, summary="under test"), **settings
        )


def test_an_episode_without_any_reward_is_refused():
    with pytest.raises(ConfigError, match="no reward"):
        HierarchicalCredit().assign([episode("one", None, ["s"])])
