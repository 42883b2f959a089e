"""Fork credit over a replay function with known answers: choice of forks, budget, sharing, advantages, divergence."""

import asyncio
import math
from collections import Counter

import msgspec
import pytest

from agl import CreditEntry, PluginManager
from agl.contracts import CounterfactualCredit, DivergenceError, ForkPlan
from agl.errors import ConfigError
from agl.schemas import Attempt, Episode, ErrorInfo, Rollout, Transition, pack_floats, pack_ids
from agl_rewards.credit.fork import ForkCredit
from agl_testing.conformance import CreditConformance

ROLES = ("rider", "saboteur", "hero")
WORTH = {"rider": 0.0, "saboteur": -1.0, "hero": 2.0}
"""The contribution of a word of 1; a word of 2 adds twice as much."""


class TestForkConformance(CreditConformance):
    @pytest.fixture
    def credit(self):
        return ForkCredit()


def reward_of(words):
    return math.fsum(WORTH[role] * word for role, word in zip(ROLES, words, strict=True))


def transitions(name, words, *, is_chained=False, versions=("", "", ""), chance=0.5):
    """Return the calls of a run: each role reads its name, and in chained runs also the answers before."""
    heard, calls = [], []
    for place, (role, word) in enumerate(zip(ROLES, words, strict=True)):
        calls.append(
            Transition(
                rollout_id=name,
                attempt_id=f"{name}.1",
                span_id=f"{name}/{role}",
                agent=role,
                prompt_ids=pack_ids([100 + place, *(heard if is_chained else [])]),
                response_ids=pack_ids([word]),
                logprobs=pack_floats([math.log(chance)]),
                model_version=versions[place],
            )
        )
        heard.append(word)
    return tuple(calls)


def episode(name, words, *, group="g", **options):
    return Episode(
        rollout=Rollout(rollout_id=name, task={}, group_id=group, status="succeeded"),
        attempt=None,
        reward=reward_of(words),
        transitions=transitions(name, words, **options),
    )


def words_of(each):
    return [int.from_bytes(call.response_ids, "little") for call in each.transitions]


class World:
    """Runs forks of a team in which a model answers ``said``, and remembers the requests."""

    def __init__(self, episodes, *, is_chained=False, said=9, diverges=lambda plan: False, fails=lambda plan: False):
        self.known = {each.rollout.rollout_id: each for each in episodes}
        self.is_chained, self.said, self.diverges, self.fails = is_chained, said, diverges, fails
        self.plans, self.calls = [], 0

    async def __call__(self, plans):
        assert len(set(plans)) == len(plans)
        self.plans += plans
        return [self._fork(plan) for plan in plans]

    def _fork(self, plan: ForkPlan) -> Episode:
        assert plan.is_coupled
        base = self.known[plan.rollout_id]
        words = words_of(base)
        place = [call.span_id for call in base.transitions].index(plan.span_id)
        versions = ["replay:recorded"] * 3
        if plan.answer_rollout:
            given = self.known[plan.answer_rollout]
            spans = [call.span_id for call in given.transitions]
            versions[place], words[place] = "replay:sibling", words_of(given)[spans.index(plan.answer_span)]
        else:
            versions[place], words[place] = "", self.said
        if self.is_chained and words[place] != words_of(base)[place]:
            for later in range(place + 1, 3):
                versions[later], words[later] = "", self.said
        name = f"fork-{len(self.known)}"
        status, error = ("failed", "X") if self.fails(plan) else ("succeeded", "")
        if self.diverges(plan):
            status, error = "failed", f"{DivergenceError.__module__}.{DivergenceError.__qualname__}"
        info = ErrorInfo(type=error, message="it went another way") if error else None
        found = Episode(
            rollout=Rollout(rollout_id=name, task={}, group_id="g", status=status),
            attempt=Attempt(attempt_id=f"{name}.1", rollout_id=name, number=1, worker="w", error=info),
            reward=None if error else reward_of(words),
            transitions=transitions(name, words, is_chained=self.is_chained, versions=versions),
        )
        self.known[name] = found
        self.calls += versions.count("")
        return found


class Unanswered(World):
    """Runs forks in which every call fails before it is recorded."""

    def _fork(self, plan):
        return msgspec.structs.replace(super()._fork(plan), transitions=())


def prepare(episodes, world=None, *, step=1, **params):
    credit = ForkCredit(**params)
    return asyncio.run(credit.prepare(episodes, step=step, replay=world or World(episodes)))


def advantages(prepared, **params):
    """Return the advantage of every call by role, for each episode."""
    rows = ForkCredit(**params).assign(prepared)
    roles = {call.span_id: call.agent for each in prepared for call in each.transitions}
    return [{roles[given.span_id]: given.value for given in row} for row in rows]


def test_call_gets_the_reward_less_the_mean_of_runs_with_the_other_answers():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2)), episode("r3", (1, 1, 1))]
    first, second, third = advantages(prepare(given, calls_per_rollout=0))
    # One of the two others said the same, so that the difference of 1 to the other answer counts half.
    assert {"rider": 0.0, "saboteur": 0.5, "hero": -1.0} == first == third
    assert {"rider": 0.0, "saboteur": -1.0, "hero": 2.0} == second


def test_value_is_final_and_carries_the_baseline_of_its_role():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2))]
    rows = ForkCredit().assign(prepare(given))
    assert {"g/rider", "g/saboteur", "g/hero"} == {each.baseline for row in rows for each in row}
    assert all(each.is_advantage for row in rows for each in row)


def test_answers_of_siblings_stand_in_without_a_model_call():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2))]
    world = World(given)
    prepare(given, world, calls_per_rollout=0)
    assert 2 * 3 == len(world.plans)
    assert {("r1", "r2"), ("r2", "r1")} == {(plan.rollout_id, plan.answer_rollout) for plan in world.plans}
    assert 0 == world.calls


def test_equal_answers_run_once_for_all_that_gave_them():
    given = [episode("r1", (1, 1, 1)), *(episode(f"r{n}", (2, 2, 2)) for n in range(2, 6))]
    world = World(given)
    prepare(given, world, calls_per_rollout=0)
    assert 5 * 3 == len(world.plans)


def test_sibling_with_the_same_beginning_is_a_fork_that_nobody_runs():
    given = [episode("r1", (1, 1, 1), is_chained=True), episode("r2", (2, 0, 0), is_chained=True)]
    world = World(given, is_chained=True)
    first, second = advantages(prepare(given, world, calls_per_rollout=0))
    assert [] == world.plans
    assert (1.0, -1.0) == (first["rider"], second["rider"])  # what follows differs, and its noise stays
    # Nothing shares what the others read, so they are compared with the return of the other rollout.
    assert (1.0, 1.0) == (first["saboteur"], first["hero"])


@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_forks_make_half_as_many_model_calls_as_the_rollouts_by_default(size, is_chained):
    given = [episode(f"r{n}", (n, n % 2, n % 3), is_chained=is_chained) for n in range(size)]
    world = World(given, is_chained=is_chained)
    prepare(given, world)
    budget = size * 3 // 2
    assert world.calls <= budget
    assert is_chained or world.calls == budget


def test_budget_is_in_model_calls_per_rollout():
    given = [episode(f"r{n}", (n, n, n)) for n in range(4)]
    world = World(given)
    prepare(given, world, calls_per_rollout=2.5)
    assert 10 == world.calls


def test_a_drawn_answer_is_an_alternative_for_all_calls_in_its_state():
    given = [episode("r1", (1, 1, 1)), episode("r2", (1, 1, 1))]
    world = World(given, said=2)
    first, second = advantages(prepare(given, world, calls_per_rollout=3))
    assert 6 == world.calls
    drawn = Counter(plan.span_id.partition("/")[2] for plan in world.plans if not plan.answer_rollout)
    # Each call has all draws of its role as alternatives, and the sibling's answer, which is the same.
    expected = {role: -WORTH[role] * drawn[role] / (drawn[role] + 1) for role in ROLES}
    assert pytest.approx(expected) == first == second


def test_forks_go_where_another_answer_is_likely():
    def sure(name):
        calls = list(episode(name, (1, 1, 1)).transitions)
        calls[0] = msgspec.structs.replace(calls[0], logprobs=pack_floats([-0.0001]))
        return msgspec.structs.replace(episode(name, (1, 1, 1)), transitions=tuple(calls))

    given = [sure("r1"), sure("r2")]
    world = World(given)
    prepare(given, world, calls_per_rollout=4)
    drawn = Counter(plan.span_id.partition("/")[2] for plan in world.plans if not plan.answer_rollout)
    assert {"saboteur": 4, "hero": 4} == drawn


def test_fork_that_would_ask_for_more_later_calls_comes_after_a_cheap_one():
    given = [episode("r1", (1, 1, 1), is_chained=True)]
    world = World(given, is_chained=True)
    prepare(given, world, calls_per_rollout=1)
    assert ["r1/hero"] == [plan.span_id for plan in world.plans]


def test_drawn_answer_that_is_the_same_counts_as_the_run_itself():
    given = [episode("r1", (1, 1, 1))]
    world = World(given, said=1)
    assert [{"rider": 0.0, "saboteur": 0.0, "hero": 0.0}] == advantages(prepare(given, world, calls_per_rollout=9))


def test_fork_that_fails_by_itself_is_worth_what_the_setting_says_and_one_that_diverged_nothing():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2))]
    failing = World(given, fails=lambda plan: plan.span_id == "r1/hero")
    first, _ = advantages(prepare(given, failing, calls_per_rollout=0, failed=-7.0))
    assert 1.0 + 7.0 == first["hero"]
    diverging = World(given, diverges=lambda plan: plan.span_id == "r1/hero")
    first, _ = advantages(prepare(given, diverging, calls_per_rollout=0))
    assert 1.0 - 2.0 == first["hero"]  # compared with the other rollout's return


def test_fork_whose_call_failed_counts_once_and_the_next_one_is_another():
    single = msgspec.structs.replace(episode("r1", (1, 1, 1)), transitions=transitions("r1", (1, 1, 1))[:1])
    asked = Unanswered([single])
    asked.known["r1"] = episode("r1", (1, 1, 1))
    asked.fails = lambda plan: plan.sample == 0
    rows = advantages(prepare([single], asked, calls_per_rollout=1, failed=-5.0))
    assert [0, 1, 2] == [plan.sample for plan in asked.plans]
    # The first fork is worth -5, the other two with the word 9 what their words are.
    other = reward_of((9, 1, 1))
    assert [{"rider": pytest.approx(1.0 - (-5.0 + 2 * other) / 3)}] == rows


def test_forks_without_an_answer_do_not_all_go_to_one_call():
    given = [episode("r1", (1, 1, 1))]
    world = Unanswered(given, fails=lambda plan: True)
    prepare(given, world, calls_per_rollout=2)
    assert ["r1/hero", "r1/hero", "r1/saboteur"] == [plan.span_id for plan in world.plans][:3]


def test_step_in_which_all_forks_diverge_is_an_error_that_names_the_first():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2))]
    with pytest.raises(ConfigError, match=r"all 9 forks of this step diverged .* The first: it went another way"):
        prepare(given, World(given, diverges=lambda plan: True))


def test_limits_of_replays_and_of_forks_per_call_hold():
    given = [episode(f"r{n}", (n, n, n)) for n in range(6)]
    world = World(given)
    prepare(given, world, calls_per_rollout=0, forks=2)
    assert {2} == set(Counter((plan.rollout_id, plan.span_id) for plan in world.plans).values())
    world = World(given)
    prepare(given, world, max_replays=4)
    assert 4 == len(world.plans)


def test_tasks_are_never_compared():
    given = [episode("r1", (1, 1, 1)), episode("x1", (2, 2, 2), group="x")]
    world = World(given)
    prepared = prepare(given, world, calls_per_rollout=0)
    assert [] == world.plans
    assert [{role: 0.0 for role in ROLES}] * 2 == advantages(prepared)


def test_rollouts_of_a_skipped_step_keep_their_return():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2))]
    world = World(given)
    prepared = prepare(given, world, step=2, every=2)
    assert ([], given) == (world.plans, prepared)
    assert [[1.0] * 3, [2.0] * 3] == [[each.value for each in row] for row in ForkCredit().assign(prepared)]
    assert not any(each.is_advantage for row in ForkCredit().assign(prepared) for each in row)


def test_calls_without_token_ids_are_forked_by_the_model_alone():
    def blank(name):
        calls = [
            msgspec.structs.replace(call, prompt_ids=b"", response_ids=b"", logprobs=b"")
            for call in episode(name, (1, 1, 1)).transitions
        ]
        return msgspec.structs.replace(episode(name, (1, 1, 1)), transitions=tuple(calls))

    given = [blank("r1"), blank("r2")]
    world = World([episode("r1", (1, 1, 1)), episode("r2", (1, 1, 1))], said=2)
    prepare(given, world, calls_per_rollout=3)
    assert world.plans
    assert not any(plan.answer_rollout for plan in world.plans)


def test_repeated_step_asks_for_the_same_forks():
    given = [episode(f"r{n}", (n, n % 2, n % 3)) for n in range(4)]
    first, second = World(given), World(given)
    assert advantages(prepare(given, first)) == advantages(prepare(given, second))
    assert first.plans == second.plans


def test_episodes_stay_as_they_were():
    given = [episode("r1", (1, 1, 1)), episode("r2", (2, 2, 2))]
    before = msgspec.msgpack.encode(given)
    assert isinstance(ForkCredit(), CounterfactualCredit)
    prepare(given)
    assert before == msgspec.msgpack.encode(given)


@pytest.mark.parametrize(
    "params",
    [{"forks": 0}, {"every": 0}, {"max_replays": 0}, {"calls_per_rollout": -1.0}],
)
def test_impossible_settings_are_refused(params):
    with pytest.raises(ConfigError, match=f": {next(iter(params))} is .*; write "):
        PluginManager().build(CreditEntry(name="fork", factory=ForkCredit, summary="under test"), **params)
