from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import CreditEntry, PluginManager
from agl.contracts import Credit
from agl.episodes import EpisodeCredit, build_episode
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, RejectReason, Reward, Transition
from agl_rewards.credit.role import RoleCredit
from agl_rewards.credit.turn import TurnCredit
from agl_testing.conformance.credit import CreditConformance
from tests.cases import ATTEMPT, ROLLOUT, call_span, reward_span


class TestEpisodeCredit(CreditConformance):
    @pytest.fixture
    def credit(self) -> Credit:
        return EpisodeCredit()


class TestTurnCredit(CreditConformance):
    @pytest.fixture(params=["group", "turn"])
    def credit(self, request: pytest.FixtureRequest) -> Credit:
        return TurnCredit(gamma=0.9, baseline=request.param)


class TestRoleCredit(CreditConformance):
    @pytest.fixture
    def credit(self) -> Credit:
        return RoleCredit(roles={"write|rewrite": {"reward": "style", "gamma": 0.5}})


def call(
    number: int, agent: str = "a", turn: int | None = None, reward: float | None = None, reject: RejectReason = ""
) -> Transition:
    return Transition(
        rollout_id="r",
        attempt_id="r.1",
        span_id=f"c{number}",
        agent=agent,
        turn=number if turn is None else turn,
        reward=reward,
        reject=reject,
    )


def episode(*calls: Transition, reward: float | None = 1.0, rewards: tuple[Reward, ...] = ()) -> Episode:
    return Episode(rollout=ROLLOUT, attempt=ATTEMPT, reward=reward, rewards=rewards, transitions=calls)


def values(credit: Credit, *episodes: Episode) -> list[Mapping[str, float]]:
    return [{given.span_id: given.value for given in credits} for credits in credit.assign(episodes)]


def credits_of(credit: Credit, one: Episode) -> list[CallCredit]:
    return list(credit.assign([one])[0])


def test_episode_credit_gives_every_call_the_return() -> None:
    expected = [CallCredit(span_id=f"c{i}", value=0.5, baseline="g") for i in (0, 1)]
    assert expected == credits_of(EpisodeCredit(), episode(call(0), call(1, "b"), call(2, reject="late"), reward=0.5))


def test_credit_without_a_group_compares_a_rollout_with_nothing() -> None:
    alone = msgspec.structs.replace(episode(call(0)), rollout=msgspec.structs.replace(ROLLOUT, group_id=""))
    assert ["r"] == [given.baseline for given in credits_of(EpisodeCredit(), alone)]


@pytest.mark.parametrize("credit", [EpisodeCredit(), TurnCredit(), RoleCredit()])
def test_credit_refuses_a_trained_episode_without_reward(credit: Credit) -> None:
    with pytest.raises(ConfigError, match="rollout r has model calls to train on and no reward"):
        credit.assign([episode(call(0), reward=None)])
    assert [[]] == [list(given) for given in credit.assign([episode(call(0, reject="late"), reward=None)])]


def test_turn_credit_discounts_turn_rewards_and_the_final_one() -> None:
    calls = (call(0, reward=1.0), call(1, "b"), call(2, reward=2.0))
    assert [{"c0": 1.0 + 0.25 * 6.0, "c1": 0.5 * 6.0, "c2": 6.0}] == values(
        TurnCredit(gamma=0.5), episode(*calls, reward=4.0)
    )


def test_turn_credit_takes_turn_rewards_without_a_final_one() -> None:
    assert [{"c0": 3.0, "c1": 2.0}] == values(
        TurnCredit(), episode(call(0, reward=1.0), call(1, reward=2.0), reward=None)
    )


def test_turn_credit_gives_choices_of_one_turn_the_same_future() -> None:
    calls = (call(0), call(1, turn=1, reward=1.0), call(2, turn=1, reward=3.0), call(3, turn=2, reward=8.0))
    expected = {"c0": 0.5 * (4.0 + 4.0), "c1": 1.0 + 4.0, "c2": 3.0 + 4.0, "c3": 8.0}
    assert [expected] == values(TurnCredit(gamma=0.5), episode(*calls, reward=0.0))


def test_turn_credit_earns_a_rejected_calls_reward_and_counts_no_turn() -> None:
    calls = (call(0), call(1, reward=2.0, reject="incomplete"), call(2))
    assert [{"c0": 0.5 * 3.0, "c2": 1.0}] == values(TurnCredit(gamma=0.5), episode(*calls))


def test_turn_credit_can_compare_equal_turns() -> None:
    given = credits_of(TurnCredit(baseline="turn"), episode(call(0), call(1, "b", turn=0)))
    assert ["g/a/0", "g/b/0"] == [one.baseline for one in given]


def test_turn_credit_compares_the_rollouts_of_a_task_unless_told_otherwise() -> None:
    given = credits_of(TurnCredit(), episode(call(0), call(1, "b")))
    assert [CallCredit(span_id=f"c{n}", value=1.0, baseline="g") for n in (0, 1)] == given


def test_turn_credit_keeps_a_retry_that_lost_apart_from_the_call_that_won() -> None:
    calls = (call(0), call(1, turn=1, reward=2.0, reject="superseded"), call(2, turn=1), call(3, turn=2))
    assert [{"c0": 0.5 * 2.5, "c2": 0.5, "c3": 1.0}] == values(TurnCredit(gamma=0.5), episode(*calls))
    cut = (call(0), call(1, turn=1), call(2, turn=1, reward=2.0, reject="incomplete"))
    assert [{"c0": 1.5, "c1": 3.0}] == values(TurnCredit(gamma=0.5), episode(*cut))


@pytest.mark.parametrize("credit", [TurnCredit(gamma=0.5), RoleCredit(gamma=0.5)])
def test_rejected_choice_between_others_leaves_them_one_turn(credit: Credit) -> None:
    choices = (call(1, turn=1, reward=4.0), call(2, turn=1, reward=2.0, reject="missing_token_ids"), call(3, turn=1))
    expected = {"c0": 0.5 * (4.0 + 2.0 + 0.5), "c1": 4.0 + 0.5, "c3": 0.5, "c4": 1.0}
    assert [expected] == values(credit, episode(call(0), *choices, call(4, turn=2)))
    assert [{"c0": 0.5 * 7.0, "c1": 5.0, "c3": 1.0}] == values(credit, episode(call(0), *choices))


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=6), st.floats(0, 1))
def test_choices_of_a_turn_differ_by_their_own_rewards_only(choices: list[tuple[float, bool]], gamma: float) -> None:
    made = [call(i, turn=0, reward=r, reject="missing_token_ids" if out else "") for i, (r, out) in enumerate(choices)]
    (found,) = values(TurnCredit(gamma=gamma), episode(*made, call(9, turn=1)))
    futures = [found[f"c{i}"] - reward for i, (reward, out) in enumerate(choices) if not out]
    assert pytest.approx([futures[0]] * len(futures) if futures else [], abs=1e-9) == futures


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_discount_may_be_nothing_or_whole(gamma: float) -> None:
    assert [{"c0": gamma, "c1": 1.0}] == values(TurnCredit(gamma=gamma), episode(call(0), call(1)))
    assert [{"c0": gamma, "c1": 1.0}] == values(RoleCredit(gamma=gamma), episode(call(0), call(1)))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(-10, 10))
def test_turn_credit_without_discount_gives_the_first_turn_everything(rewards: list[float], final: float) -> None:
    one = episode(*(call(i, reward=reward) for i, reward in enumerate(rewards)), reward=final)
    assert pytest.approx(sum(rewards) + final, abs=1e-9) == values(TurnCredit(), one)[0]["c0"]


def test_role_credit_pays_each_role_by_its_own_reward() -> None:
    rewards = (
        Reward(value=9.0, name="sql"),
        Reward(value=1.0, name="sql"),
        Reward(value=5.0, name="critic", source="agent"),
        Reward(value=0.25, name="critic"),
    )
    credit = RoleCredit(roles={"write|rewrite": {"reward": "sql"}, "check": {"reward": "critic"}})
    one = episode(
        call(0, "write"),
        call(1, "check"),
        call(2, "rewrite"),
        call(3, "plan"),
        reward=7.0,
        rewards=rewards,
    )
    assert [{"c0": 1.0, "c1": 0.25, "c2": 1.0, "c3": 7.0}] == values(credit, one)
    baselines = [given.baseline for given in credits_of(credit, one)]
    assert ["g/write|rewrite", "g/check", "g/write|rewrite", "g/plan"] == baselines


def test_role_credit_discounts_over_a_roles_own_turns() -> None:
    credit = RoleCredit(roles={"a": {"gamma": 0.5}})
    calls = (call(0, "a"), call(1, "b"), call(2, "b"), call(3, "a", reward=1.0))
    assert [{"c0": 1.0, "c1": 1.0, "c2": 1.0, "c3": 2.0}] == values(credit, episode(*calls))


def test_role_credit_compares_each_role_as_it_says() -> None:
    roles = {"a": {"baseline": "turn"}, "b|c": {"baseline": "group"}}
    one = episode(call(0, "a"), call(1, "b"), call(2, "c"), call(3, "a", turn=1), call(4, "d"))
    baselines = [given.baseline for given in credits_of(RoleCredit(roles=roles), one)]
    assert ["g/a/0", "g", "g", "g/a/1", "g/d"] == baselines


def test_role_credit_sums_the_rewards_that_its_expression_matches_as_a_whole() -> None:
    rewards = tuple(Reward(value=value, name=name) for value, name in ((1.0, "a1"), (2.0, "a2"), (4.0, "a22")))
    credit = RoleCredit(roles={"a": {"reward": "a."}})
    assert [{"c0": 3.0}] == values(credit, episode(call(0), reward=None, rewards=rewards))


def test_role_earns_no_reward_that_its_attempt_reported_late() -> None:
    spans = [
        call_span(1),
        reward_span(2, 1.0, name="q"),
        reward_span(3, -5.0, name="q", is_late=True),
        reward_span(4, -7.0, name="q", is_late=True, source="agent"),
    ]
    one = build_episode(ROLLOUT, ATTEMPT, spans)
    assert 1.0 == one.reward
    for trusts in (False, True):
        credit = RoleCredit(roles={".*": {"reward": "q"}}, trust_agent=trusts)
        assert [1.0] == list(values(credit, one)[0].values())


def test_role_credit_takes_agents_own_rewards_where_they_are_trusted() -> None:
    one = episode(call(0), reward=None, rewards=(Reward(value=2.0, name="own", source="agent"),))
    roles = {"a": {"reward": "own"}}
    assert [{"c0": 2.0}] == values(RoleCredit(roles=roles, trust_agent=True), one)
    with pytest.raises(ConfigError, match=r"recorded: \['own'\]"):
        RoleCredit(roles=roles).assign([one])


def test_role_without_its_reward_may_have_turn_rewards() -> None:
    one = episode(call(0, reward=0.5), call(1, "b"), reward=1.0)
    assert [{"c0": 0.5, "c1": 1.0}] == values(RoleCredit(roles={"a": {"reward": "sql"}}), one)
    alone = episode(call(0, reward=0.5), reward=None)
    assert [{"c0": 0.5}] == values(RoleCredit(), alone)


def test_role_credit_names_the_reward_that_is_missing() -> None:
    credit = RoleCredit(roles={"a": {"reward": "sql"}})
    expected = (
        r"^role 'a' earns rewards named 'sql' and rollout r has none with a value; recorded: \['other'\]\. Emit that "
        r"reward, or correct the name in the credit's roles$"
    )
    with pytest.raises(ConfigError, match=expected):
        credit.assign([episode(call(0), rewards=(Reward(value=1.0, name="other"),))])


def build(credit: type[Any], **settings: object) -> Any:
    """Make a credit as an experiment does, which checks its settings."""
    return PluginManager().build(CreditEntry(name="credit", factory=credit, summary="under test"), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"roles": {"a": {"rewards": "x"}}}, "role 'a' has no setting 'rewards'; use reward, gamma and baseline"),
        ({"roles": {"(": {}}}, r"^the role '\(' is not a regular expression: .*; correct it"),
        ({"roles": {"a": {"reward": "("}}}, r"^the reward of role 'a' '\(' is not a regular expression"),
        ({"roles": {"a": {"gamma": 1.5}}}, r"role 'a': gamma is 1\.5; write a number of at least 0 and of at most 1"),
        ({"roles": {"a": {"baseline": "task"}}}, "role 'a': baseline is \"task\"; write one of role, turn, group"),
        ({"gamma": -0.1}, r"gamma is -0\.1; write a number of at least 0 and of at most 1"),
    ],
)
def test_role_credit_refuses_wrong_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(RoleCredit, **settings)


def test_turn_credit_refuses_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="gamma is 2; write a number of at least 0 and of at most 1"):
        build(TurnCredit, gamma=2)
    with pytest.raises(ConfigError, match='baseline is "role"; write one of group, turn'):
        build(TurnCredit, baseline="role")
