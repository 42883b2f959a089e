"""Leave-one-out and Shapley credit over a replay function with known answers: plans, budget, fallbacks, shares."""

import asyncio
import math

import msgspec
import pytest

from agl import CreditEntry, PluginManager
from agl.contracts import CounterfactualCredit
from agl.errors import ConfigError
from agl.schemas import Episode, Rollout, Transition
from agl_rewards.credit.counterfactual import LeaveOneOutCredit, ShapleyCredit
from agl_testing.conformance import CreditConformance

ADDS = {"hero": 1.0, "saboteur": -0.5, "rider": 0.0}
BOTH = [LeaveOneOutCredit, ShapleyCredit]


class TestLeaveOneOutConformance(CreditConformance):
    @pytest.fixture
    def credit(self):
        return LeaveOneOutCredit()


class TestShapleyConformance(CreditConformance):
    @pytest.fixture
    def credit(self):
        return ShapleyCredit()


class World:
    """Replays of a team whose members' contributions add up; remembers the plans of every request."""

    def __init__(self, *, fails=()):
        self.requests, self.fails = [], set(fails)

    async def __call__(self, plans):
        self.requests.append(list(plans))
        assert len(set(plans)) == len(plans)
        return [self._replayed(plan) for plan in plans]

    @property
    def plans(self):
        return [plan for request in self.requests for plan in request]

    def _replayed(self, plan):
        is_failed = bool(self.fails.intersection(plan.replaced))
        rollout = Rollout(rollout_id="replay", task={}, status="failed" if is_failed else "succeeded")
        reward = None if is_failed else math.fsum(value for name, value in ADDS.items() if name not in plan.replaced)
        return Episode(rollout=rollout, attempt=None, reward=reward)


def episode(name, *, agents=tuple(ADDS), group="g", reward=None, rejected=()):
    calls = tuple(
        Transition(
            rollout_id=name,
            attempt_id=f"{name}.1",
            span_id=f"{name}-{agent}",
            agent=agent,
            reject="not_selected" if agent in rejected else "",
        )
        for agent in agents
    )
    value = math.fsum(ADDS.get(agent, 0.0) for agent in agents) if reward is None else reward
    rollout = Rollout(rollout_id=name, task={}, group_id=group, status="succeeded")
    return Episode(rollout=rollout, attempt=None, reward=value, transitions=calls)


def prepare(credit, episodes, world, *, step=1):
    return asyncio.run(credit.prepare(episodes, step=step, replay=world))


def shares(credit, prepared):
    calls = {call.span_id: call.agent for each in prepared for call in each.transitions}
    return [{calls[given.span_id]: given.value for given in row} for row in credit.assign(prepared)]


@pytest.mark.parametrize("make", BOTH)
def test_agent_gets_what_it_adds_as_a_final_advantage_where_that_is_asked_for(make):
    credit = make(baseline="counterfactual")
    prepared = prepare(credit, [episode("r1"), episode("r2")], World())
    assert [ADDS, ADDS] == shares(credit, prepared)
    assert all(given.is_advantage for row in credit.assign(prepared) for given in row)


@pytest.mark.parametrize("make", BOTH)
def test_shares_can_be_returns_that_are_compared_within_the_role(make):
    credit = make(baseline="group")
    prepared = prepare(credit, [episode("r1")], World())
    (row,) = credit.assign(prepared)
    assert [False] * 3 == [given.is_advantage for given in row]
    assert ["g/hero", "g/saboteur", "g/rider"] == [given.baseline for given in row]


@pytest.mark.parametrize("make", BOTH)
def test_failure_of_the_only_agent_that_matters_gets_less_than_its_success(make):
    """Silence and the failure both earn nothing, so the failure's share is 0, which alone is no evidence against it."""

    class Silence(World):
        def _replayed(self, plan):
            return Episode(rollout=Rollout(rollout_id="r", task={}, status="succeeded"), attempt=None, reward=0.0)

    given = [episode(f"r{n}", agents=("hero",), reward=reward) for n, reward in enumerate([1.0, 0.0, 0.0])]
    credit = make()
    found = shares(credit, prepare(credit, given, Silence()))
    assert [{"hero": 1.0}, {"hero": -0.5}, {"hero": -0.5}] == found
    assert all(given.is_advantage for row in credit.assign(prepare(credit, given, Silence())) for given in row)


@pytest.mark.parametrize("make", BOTH)
def test_equal_shares_leave_no_rounding_to_train_on(make):
    class Silence(World):
        def _replayed(self, plan):
            return Episode(rollout=Rollout(rollout_id="r", task={}, status="succeeded"), attempt=None, reward=0.0)

    given = [episode(f"r{n}", agents=("hero",), reward=0.1) for n in range(3)]
    credit = make()
    assert [{"hero": 0.0}] * 3 == shares(credit, prepare(credit, given, Silence()))


@pytest.mark.parametrize("make", BOTH)
def test_credits_are_counterfactual_and_leave_episodes_as_they_were(make):
    given = [episode("r1")]
    before = msgspec.msgpack.encode(given)
    assert isinstance(make(), CounterfactualCredit)
    prepare(make(), given, World())
    assert before == msgspec.msgpack.encode(given)


def test_leave_one_out_replays_once_per_agent_and_sample():
    world = World()
    prepare(LeaveOneOutCredit(samples=2, text="pass"), [episode("r1"), episode("r2")], world)
    assert 2 * 3 * 2 == len(world.plans)
    assert {("hero",), ("saboteur",), ("rider",)} == {plan.replaced for plan in world.plans}
    assert {("silent", "pass", 0), ("silent", "pass", 1)} == {
        (plan.how, plan.text, plan.sample) for plan in world.plans
    }


def test_shapley_replays_the_silent_team_once_per_task():
    world = World()
    prepare(ShapleyCredit(), [episode("r1"), episode("r2"), episode("x1", group="x")], world)
    silent = [plan.rollout_id for plan in world.plans if len(plan.replaced) == 3]
    assert 3 * 6 + 2 == len(world.plans)
    assert ["r1", "x1"] == sorted(silent)


def test_siblings_stand_in_at_most_once_before_they_are_asked_again():
    world = World()
    prepare(LeaveOneOutCredit(replace="sibling", samples=3), [episode("r1"), episode("r2"), episode("r3")], world)
    of_first = [
        (plan.sibling, plan.sample) for plan in world.plans if plan.rollout_id == "r1" and "hero" in plan.replaced
    ]
    assert [("r2", 0), ("r3", 0), ("r2", 1)] == of_first
    assert all(plan.sibling != plan.rollout_id for plan in world.plans)


def test_a_task_without_siblings_is_left_to_its_return():
    credit, world = LeaveOneOutCredit(replace="sibling"), World()
    prepared = prepare(credit, [episode("r1"), episode("r2"), episode("x1", group="x")], world)
    assert {"r1", "r2"} == {plan.rollout_id for plan in world.plans}
    assert [False] * 3 == [given.is_advantage for given in credit.assign(prepared)[2]]


def test_siblings_without_any_are_an_error_that_says_so():
    with pytest.raises(ConfigError, match="no task has two rollouts"):
        prepare(LeaveOneOutCredit(replace="sibling"), [episode("r1")], World())


@pytest.mark.parametrize("make", BOTH)
def test_agents_that_do_not_train_belong_to_the_world(make):
    credit, world = make(), World()
    prepared = prepare(credit, [episode("r1", rejected=("rider",))], world)
    assert all("rider" not in plan.replaced for plan in world.plans)
    assert [{"hero": 1.0, "saboteur": -0.5}] == shares(credit, prepared)


@pytest.mark.parametrize("make", BOTH)
def test_other_steps_get_the_return_compared_within_the_role(make):
    credit, world = make(every=3), World()
    given = [episode("r1")]
    for step in (2, 3):
        prepared = prepare(credit, given, world, step=step)
        assert [{name: 0.5 for name in ADDS}] == shares(credit, prepared)
        assert [False] * 3 == [each.is_advantage for each in credit.assign(prepared)[0]]
    assert [] == world.plans
    prepare(credit, given, world, step=4)
    assert world.plans


def test_groups_beyond_the_budget_take_turns():
    credit = LeaveOneOutCredit(max_replays=7)
    episodes = [episode(f"{group}1", group=group) for group in "abc"]
    replayed = []
    for step in (1, 2, 3):
        world = World()
        prepare(credit, episodes, world, step=step)
        assert len(world.plans) <= 7
        replayed.append({plan.rollout_id for plan in world.plans})
    assert [{"a1", "b1"}, {"b1", "c1"}, {"c1", "a1"}] == replayed


def test_a_budget_that_no_group_fits_into_is_refused():
    with pytest.raises(ConfigError, match="the smallest group needs 6"):
        prepare(LeaveOneOutCredit(max_replays=5), [episode("r1"), episode("r2")], World())


@pytest.mark.parametrize("make", BOTH)
def test_a_failed_replay_is_worth_what_was_declared(make):
    credit = make(failed=-2.0)
    (found,) = shares(credit, prepare(credit, [episode("r1", agents=("hero",))], World(fails={"hero"})))
    assert {"hero": 3.0} == found


def test_calls_without_any_name_are_refused():
    with pytest.raises(ConfigError, match=r"agl\.operation"):
        prepare(LeaveOneOutCredit(), [episode("r1", agents=("",))], World())


@pytest.mark.parametrize("make", BOTH)
def test_episodes_without_calls_get_nothing(make):
    credit, world = make(), World()
    assert [[]] == credit.assign(prepare(credit, [episode("r1", agents=())], world))
    assert [] == world.plans


def test_shapley_credits_work_that_another_agent_spoilt():
    """The hero earns 1 and the saboteur takes it all away, so leave-one-out gives the hero nothing."""

    class Spoilt(World):
        def _replayed(self, plan):
            reward = float("hero" not in plan.replaced and "saboteur" in plan.replaced)
            return Episode(rollout=Rollout(rollout_id="r", task={}, status="succeeded"), attempt=None, reward=reward)

    given = [episode("r1", agents=("hero", "saboteur"), reward=0.0)]
    one, value = LeaveOneOutCredit(), ShapleyCredit()
    assert [{"hero": 0.0, "saboteur": -1.0}] == shares(one, prepare(one, given, Spoilt()))
    assert [{"hero": 0.5, "saboteur": -0.5}] == shares(value, prepare(value, given, Spoilt()))


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize(
    "settings", [{"samples": 0}, {"every": 0}, {"max_replays": 0}, {"replace": "loud"}, {"baseline": "none"}]
)
def test_impossible_settings_are_refused(make, settings):
    with pytest.raises(ConfigError, match=f": {next(iter(settings))} is .*; write "):
        PluginManager().build(CreditEntry(name="credit", factory=make, summary="under test"), **settings)
