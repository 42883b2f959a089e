"""The way of candidates among simulated customers; the store and all decisions are real."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from agl.errors import ConfigError
from agl_inspect.learning import computed_again, served_gates
from agl_inspect.records.labels import labels_of, move
from agl_inspect.records.learning import GateRules, LearnerControl, ServedUnit
from agl_inspect.records.splits import HOSTED, SERVED, HostedVersions, ServedSplit
from agl_learn.contracts import Conversation, SettledPage
from agl_learn.fall import FallDetector
from agl_learn.learner import Learner
from worlds.customers import PROMPT, Customers, settings


def serving(
    likings: dict[str, float] | Callable[[str, str, int], float],
    *,
    proposes: str | None = None,
    seed: int = 1,
    **given: object,
) -> Customers:
    """Customers who like each version with a fixed probability, and a learner to whom one version is proposed."""

    def liked(version: str, kind: str, number: int) -> float:
        return likings(version, kind, number) if callable(likings) else likings[version]

    return Customers(liked=liked, propose=lambda train: proposes, seed=seed, settings=settings(**given))  # pyright: ignore[reportArgumentType]


def stages(customers: Customers, identity: str = "c1") -> list[str]:
    async def read() -> list[str]:
        found = await customers.learner.records.candidates.get(customers.store, identity)
        return [] if found is None else [each.stage for each in found.moves]

    return asyncio.run(read())


def run(customers: Customers, count: int, *, first: str = "old") -> Learner:
    async def work() -> None:
        await customers.open(first)
        await customers.serve(count)

    asyncio.run(work())
    return customers.learner


def test_better_version_passes_replay_and_canary_and_is_promoted() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new")

    learner = run(customers, 400)

    assert ["replay", "canary", "watch"] == stages(customers)
    assert {PROMPT: "new"} == learner.split.versions["production"]
    assert {PROMPT: "old"} == learner.split.versions["holdback"]
    assert {"production": "new"} == asyncio.run(labels_of(customers.store, PROMPT))


def test_equal_version_is_never_served() -> None:
    customers = serving({"old": 0.6, "same": 0.6}, proposes="same")

    learner = run(customers, 600)

    assert "refused" == stages(customers)[-1]
    assert {"production": 1.0} == learner.split.shares


def test_harmful_version_is_withdrawn_from_the_canary() -> None:
    customers = serving({"old": 0.8, "bad": 0.5}, proposes="bad", tasks=0, share=(0.1,), units=100)

    learner = run(customers, 700)

    assert ["canary", "withdrawn"] == stages(customers)[1:]
    assert {PROMPT: "old"} == learner.split.versions["production"]


def test_version_that_becomes_worse_is_rolled_back() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return {"old": 0.6, "new": 0.9 if number < 700 else 0.2}[version]

    customers = serving(liked, proposes="new", every=10_000)

    async def work() -> None:
        learner = await customers.open("old")
        await customers.serve(50)
        await move(customers.store, PROMPT, "candidate", await customers.publish("new"))
        await customers.serve(1000)
        assert {"production": 1.0} == learner.split.shares

    asyncio.run(work())

    assert ["suspicion", "rolled back"] == stages(customers)[-2:]
    assert {"production": "old", "candidate": "new"} == asyncio.run(labels_of(customers.store, PROMPT))


def test_decision_can_be_computed_again_to_the_last_digit() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new")
    learner = run(customers, 400)

    async def work() -> None:
        records, store = learner.records, customers.store
        candidate = (await records.candidates.read(store))["c1"]
        pairs = list((await records.pairs("c1").read(store)).values())
        units = list((await records.units("c1").read(store)).values())
        decisions = list((await records.decisions.read(store)).values())
        assert {"replay", "control", "canary"} <= {each.gate for each in decisions}
        for each in decisions:
            gate = computed_again(each, candidate, pairs, units)
            assert (each.evidence, each.lower, each.verdict) == (gate.evidence, gate.lower, gate.verdict)

    asyncio.run(work())


@pytest.mark.parametrize("every", [3, 7])
def test_restart_at_any_time_changes_nothing(every: int) -> None:
    def world() -> Customers:
        return serving({"old": 0.3, "new": 0.8}, proposes="new", seed=3)

    async def with_restarts() -> Customers:
        customers = world()
        await customers.open("old")
        for _ in range(300 // every):
            await customers.serve(every)
            await customers.learner.finish_work()
            await customers.restart()
        return customers

    restarted = asyncio.run(with_restarts())

    assert ["replay", "canary", "watch"] == stages(restarted)
    learner = restarted.learner
    assert 300 // every * every == learner.state.rated
    units = asyncio.run(learner.records.units("c1").read(restarted.store))
    assert len(units) == len({unit.unit for unit in units.values()})


def test_person_approves_before_the_canary() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new", approve="person")

    async def work() -> None:
        learner = await customers.open("old")
        await customers.serve(300)
        assert ["replay", "approval"] == [
            each.stage for each in (await learner.records.candidates.read(customers.store))["c1"].moves
        ]
        await learner.records.control.add(customers.store, {"": LearnerControl(approved=["c1"])})
        await customers.serve(200)

    asyncio.run(work())

    assert "watch" == stages(customers)[-1]


def test_label_that_a_person_moves_is_served() -> None:
    customers = serving({"old": 0.3, "new": 0.8, "mine": 0.5}, proposes="new", every=10_000)

    async def work() -> Learner:
        learner = await customers.open("old")
        await customers.serve(20)
        await move(customers.store, PROMPT, "production", await customers.publish("mine"), reason="I prefer it")
        await customers.serve(20)
        return learner

    learner = asyncio.run(work())

    assert {PROMPT: "mine"} == learner.split.versions["production"]


def test_pause_holds_proposals_and_shares() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new")

    async def work() -> None:
        learner = await customers.open("old")
        await learner.records.control.add(customers.store, {"": LearnerControl(is_paused=True)})
        await customers.serve(300)

    asyncio.run(work())

    assert [] == stages(customers)


def test_rejected_candidate_is_withdrawn() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new", every=60, share=(0.05,), units=50)

    async def work() -> Learner:
        learner = await customers.open("old")
        await customers.serve(300, until=lambda: len(learner.split.shares) > 1)
        await learner.records.control.add(customers.store, {"": LearnerControl(rejected={"c1": "rude"})})
        await customers.serve(1)
        return learner

    learner = asyncio.run(work())

    assert "withdrawn" == stages(customers)[-1]
    assert {"production": 1.0} == learner.split.shares


def test_conversations_of_one_user_count_once() -> None:
    customers = serving({"old": 0.8, "bad": 0.5}, proposes="bad", tasks=0, share=(0.5,), units=1000)
    customers.users = 30

    learner = run(customers, 600)

    units = asyncio.run(learner.records.units("c1").read(customers.store))
    assert len({unit.unit for unit in units.values()}) == len(units) <= 30


def test_excluded_users_do_not_count() -> None:
    def contradicting(past: Sequence[Conversation], tried: object) -> dict[str, str]:
        return {each.user: "reports the opposite" for each in past if each.user == "u0"}

    customers = serving({"old": 0.3, "new": 0.8}, proposes="new", tasks=0, share=(0.5,), units=5)
    customers.users, customers.contradicting = 20, contradicting

    learner = run(customers, 300)

    assert "u0" not in {unit.unit for unit in asyncio.run(learner.records.units("c1").read(customers.store)).values()}
    assert 1 == sum("u0" in line for line in customers.said)
    assert {"u0": "reports the opposite"} == learner.state.excluded


def test_users_are_compared_in_more_conversations_than_a_round_looks_at() -> None:
    sizes: list[int] = []

    def contradicting(past: Sequence[Conversation], tried: object) -> dict[str, str]:
        sizes.append(len(past))
        return {}

    customers = serving({"old": 0.8})
    customers.settings = replace(customers.settings, memory=40)
    customers.contradicting = contradicting

    run(customers, 500)

    assert 400 == max(sizes)


def test_fall_is_noticed_without_the_excluded_users() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return 0.9 if number < 300 else 0.1

    customers = serving(liked)
    customers.users, customers.liars = 20, {f"u{n}": ("",) for n in range(10)}
    customers.contradicting = lambda *_: dict.fromkeys(customers.liars, "reports the opposite")

    learner = run(customers, 400)

    assert abs(learner.state.changed_at - 300) < 20


@pytest.mark.parametrize("users", [1, 2, 3])
def test_fall_among_few_users_is_noticed(users: int) -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return 0.9 if number < 300 else 0.1

    customers = serving(liked)
    customers.users = users

    learner = run(customers, 400)

    assert abs(learner.state.changed_at - 300) < 20


def test_one_of_many_users_raises_no_alarm() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return 0.9

    customers = serving(liked)
    customers.users = 20

    async def work() -> None:
        await customers.open("old")
        await customers.serve(200)
        customers.users, customers.liars = 1, {"u0": ("",)}
        await customers.serve(200)

    asyncio.run(work())

    assert not customers.learner.state.changed_at


def test_harm_to_one_kind_is_found_where_users_ask_about_two() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return {"old": {"a": 0.2, "b": 0.8}, "bad": {"a": 0.9, "b": 0.3}}[version][kind]

    customers = serving(liked, proposes="bad", tasks=400)
    customers.users, customers.kinds = 40, ("a", "b")

    learner = run(customers, 400)

    pairs = list(asyncio.run(learner.records.pairs("c1").read(customers.store)).values())
    assert any(len(pair.kinds) == 2 for pair in pairs)
    assert ["replay", "refused"] == stages(customers)
    assert any("worse on tasks of the kind b" in line for line in customers.said)


def test_suspicion_does_not_end_by_early_luck() -> None:
    lucky = [
        ServedUnit(unit=f"u{n}", candidate="c1", kind="", is_new=bool(n % 2), share=0.5, reward=float(n % 2))
        for n in range(13)
    ]

    gate = served_gates(GateRules(error=0.05), "suspicion", lucky)["suspicion"]

    assert gate.evidence > 5
    assert "open" == gate.verdict


def test_replay_ends_if_no_other_users_come() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new")
    customers.users = 6

    run(customers, 200)

    assert ["replay", "refused"] == stages(customers)


def test_few_users_are_replayed_with_several_conversations_each() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new", every=150)
    customers.users = 20

    learner = run(customers, 200)

    pairs = asyncio.run(learner.records.pairs("c1").read(customers.store)).values()
    assert len({pair.unit for pair in pairs}) == len(pairs) <= 20
    assert any(0 < pair.old < 1 for pair in pairs)


def test_canary_of_few_users_goes_on() -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new", tasks=0, share=(0.2, 0.5))
    customers.users = 10

    run(customers, 500)

    assert ["replay", "canary", "canary", "watch"] == stages(customers)


def test_users_who_come_again_count_again_after_a_fall() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return {"old": 0.6, "new": 0.9 if number < 700 else 0.1}[version]

    customers = serving(liked, proposes="new", every=300, tasks=0, share=(0.5,))
    customers.users = 80

    run(customers, 1000)

    assert ["watch", "suspicion", "rolled back"] == stages(customers)[-3:]


def test_user_stays_excluded_while_the_ratings_contradict() -> None:
    def contradicting(past: Sequence[Conversation], tried: object) -> dict[str, str]:
        return {"u0": "reports the opposite"} if sum(each.user == "u0" for each in past) > 11 else {}

    customers = serving({"old": 0.5})
    customers.users, customers.contradicting = 20, contradicting

    learner = run(customers, 500)

    assert learner.state.rounds > 10
    assert {"u0": "reports the opposite"} == learner.state.excluded


def test_every_change_of_the_users_is_dated() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return (0.9, 0.6, 0.2)[number // 300]

    customers = serving(liked)

    async def work() -> tuple[float, float]:
        learner = await customers.open("old")
        await customers.serve(400)
        first = learner.state.changed_at
        await customers.serve(300)
        return first, learner.state.changed_at

    first, second = asyncio.run(work())

    assert abs(first - 300) < 20
    assert abs(second - 600) < 20


def test_served_version_is_suspected_after_every_fall() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return (0.9, 0.5, 0.1)[number // 400] if version == "new" else 0.2

    customers = serving(liked, proposes="new")

    learner = run(customers, 1200)

    assert abs(learner.state.changed_at - 800) < 20
    assert 2 == sum(before != "suspicion" == stage for before, stage in pairwise(stages(customers)))


@pytest.mark.parametrize("every", [1, 1000])
def test_candidate_that_fails_regression_tasks_is_refused(every: int) -> None:
    """Also if ticks, or a restart, come between the verdict and the regression tasks."""

    def liked(version: str, kind: str, number: int) -> float:
        return {"old": 0.3, "new": 0.9}[version] if kind != "regression" else float(version == "old")

    customers = serving(liked, proposes="new")
    customers.regression = 30

    async def work() -> None:
        await customers.open("old")
        for _ in range(200):
            await customers.serve(1)
            if len(await customers.learner.records.pairs("c1").read(customers.store)) > 12 and every == 1:
                await customers.learner.stop()
                await customers.restart()
                break
        await customers.serve(100)

    asyncio.run(work())

    assert ["replay", "refused"] == stages(customers)


def test_small_gain_is_replayed_until_the_verdict() -> None:
    promoted = 0
    for seed in range(8):
        customers = serving({"old": 0.6, "new": 0.75}, proposes="new", seed=seed)
        run(customers, 700)
        promoted += any("canary" in line for line in customers.said)

    assert 6 <= promoted


def test_share_grows_only_after_units_of_that_share() -> None:
    customers = serving({"old": 0.5, "new": 0.9}, proposes="new", tasks=0, share=(0.05, 0.2), units=5)
    customers.settle_s = 100.0

    async def work() -> None:
        learner = await customers.open("old")
        await customers.serve(1500, until=lambda: bool(learner.state.watched))
        units = list((await learner.records.units("c1").read(customers.store)).values())
        assert 5 <= sum(unit.is_new and unit.share == 0.2 for unit in units)

    asyncio.run(work())


def test_label_that_a_person_moves_while_a_share_grows_is_served() -> None:
    customers = serving({"old": 0.5, "new": 0.9, "mine": 0.7}, proposes="new", tasks=0, share=(0.05, 0.2), units=1)
    settled = customers.settled

    async def moving(**given: Any) -> SettledPage:
        if customers.past[-1].arm == "candidate":  # the share grows in this tick
            await move(customers.store, PROMPT, "production", "mine")
        return await settled(**given)

    async def work() -> Learner:
        await customers.open("old")
        await customers.publish("mine")
        customers.settled = moving
        await customers.serve(400, until=lambda: customers.past[-1].arm == "candidate")
        await customers.serve(2)
        return customers.learner

    learner = asyncio.run(work())

    assert {PROMPT: "mine"} == learner.split.versions["production"]


async def hosted(customers: Customers, *versions: str, **problems: str) -> None:
    """Record what a host serves."""
    record = HostedVersions(models=dict(zip(versions, versions, strict=True)), problems=problems)
    await HOSTED.add(customers.store, {PROMPT: record})


@pytest.mark.parametrize("given", [{}, {"tasks": 0}, {"approve": "person"}])
def test_canary_of_weights_waits_until_they_are_hosted(given: dict[str, Any]) -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new", **given)
    customers.weights = (PROMPT,)

    async def work() -> list[set[str]]:
        await hosted(customers, "old")
        learner = await customers.open("old")
        control = LearnerControl(approved=["c1"])
        await customers.store.save_state(learner.records.control.states({"": control}))
        await customers.serve(300)
        before = set(learner.split.versions)
        await hosted(customers, "old", "new")
        await customers.serve(5)
        return [before, set(learner.split.versions)]

    assert [{"production"}, {"production", "candidate"}] == asyncio.run(work())
    assert ["c1 waits until agl learn host serves prompt@new"] == [
        line for line in customers.said if "waits until" in line
    ]


def test_weights_are_served_once_they_are_hosted() -> None:
    """The first ones as well as those to which a person moves the label."""
    customers = serving({"old": 0.5, "mine": 0.5}, every=1000)
    customers.weights = (PROMPT,)

    async def served() -> ServedSplit | None:
        await customers.serve(5)
        return await SERVED.get(customers.store)

    async def work() -> None:
        await customers.open("old")
        assert await served() is None
        assert {"production": "old"} == await labels_of(customers.store, PROMPT)  # which the host reads
        await hosted(customers, "old")
        split = await served()
        assert split is not None
        assert {"production": {PROMPT: "old"}} == split.versions
        await hosted(customers)  # the host starts again
        await customers.restart()
        await move(customers.store, PROMPT, "production", await customers.publish("mine"))
        assert split == await served()
        await hosted(customers, "mine")
        split = await served()
        assert split is not None
        assert {"production": {PROMPT: "mine"}} == split.versions

    asyncio.run(work())

    waits = [f"production waits until agl learn host serves prompt@{version}" for version in ("old", "mine")]
    assert waits == [line for line in customers.said if "waits until" in line]


@pytest.mark.parametrize(("stage", "end"), [("replay", "refused"), ("canary", "withdrawn"), ("watch", "rolled back")])
def test_candidate_whose_weights_are_lost_ends(stage: str, end: str) -> None:
    customers = serving({"old": 0.3, "new": 0.8}, proposes="new")
    customers.weights = (PROMPT,)

    async def work() -> Learner:
        learner = await customers.open("old")
        await hosted(customers, "old", *(["new"] if stage != "replay" else []))
        await customers.serve(600, until=lambda: any(f"c1: {stage}" in line for line in customers.said))
        await hosted(customers, "old", new="its files are gone")
        await customers.serve(1)
        return learner

    learner = asyncio.run(work())

    assert [stage, end] == stages(customers)[-2:]
    assert ({"production": 1.0}, {PROMPT: "old"}) == (learner.split.shares, learner.split.versions["production"])
    assert any("prompt@new cannot be served: its files are gone" in line for line in customers.said)


def test_second_learner_of_a_store_is_refused() -> None:
    customers = serving({"old": 0.5, "new": 0.9})

    async def work() -> None:
        learner = await customers.open("old")
        await customers.store.save_state(SERVED.states({"": replace(learner.split, learner="another")}))
        with pytest.raises(ConfigError, match="another"):
            await customers.restart()

    asyncio.run(work())


def test_resource_that_was_added_to_the_file_is_served() -> None:
    customers = serving({"old": 0.5, "new": 0.9})

    async def work() -> Learner:
        await customers.open("old")
        found = await customers.restart(tone="kind")
        await customers.serve(1)
        return found

    assert {PROMPT: "old", "tone": "kind"} == asyncio.run(work()).split.versions["production"]


def test_canary_whose_split_was_ended_is_withdrawn() -> None:
    customers = serving({"old": 0.5, "new": 0.9}, proposes="new", tasks=0, share=(0.05,), units=50)

    async def work() -> Learner:
        learner = await customers.open("old")
        await customers.serve(200, until=lambda: len(learner.split.shares) > 1)
        await customers.store.save_state({key: b"" for key in SERVED.states({"": learner.split})})
        learner = await customers.restart()
        await customers.serve(5)
        return learner

    assert {"production": 1.0} == asyncio.run(work()).split.shares
    assert "withdrawn" == stages(customers)[-1]


def test_conversation_is_looked_at_once_for_a_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was recorded before the learner started."""
    heard: list[float] = []

    class Hearing(FallDetector):
        def add(self, reward: float, *, at: float, kind: str = "") -> None:
            heard.append(at)
            super().add(reward, at=at, kind=kind)

    recorded, customers = serving({"old": 0.5}), serving({"old": 0.5})
    run(recorded, 30)
    customers.past += recorded.past
    monkeypatch.setattr("agl_learn.learner.FallDetector", Hearing)

    async def work() -> None:
        await customers.open("old")
        await customers.learner.tick()

    asyncio.run(work())

    assert [each.started_at for each in recorded.past] == heard


def test_user_of_a_withdrawn_candidate_counts_for_the_next_one() -> None:
    """Also if the feedback to the conversations with the first candidate may still arrive."""
    customers = serving({"old": 0.5, "new": 0.5}, proposes="new", tasks=0, share=(0.5,), units=1000)
    customers.users, customers.settle_s = 10, 1000.0

    async def work() -> Learner:
        learner = await customers.open("old")
        await customers.serve(100)
        assert {"c1"} == {unit.candidate for unit in learner.state.open.values()}
        await learner.records.control.add(customers.store, {"": LearnerControl(rejected={"c1": "rude"})})
        await customers.serve(200)
        return learner

    learner = asyncio.run(work())

    assert "c2" == learner.state.current
    assert {"c2"} == {unit.candidate for unit in learner.state.open.values()}


def test_harm_that_begins_after_a_good_start_ends_the_canary() -> None:
    def liked(version: str, kind: str, number: int) -> float:
        return {"old": 0.5, "new": 1.0 if number < 140 else 0.0}[version]

    customers = serving(liked, proposes="new", tasks=0, share=(0.5,), units=500)

    async def work() -> None:
        learner = await customers.open("old")
        await customers.serve(140)
        assert "better" == learner._ways["c1"].gates["canary"].verdict  # pyright: ignore[reportPrivateUsage]
        await customers.serve(400)

    asyncio.run(work())

    assert ["replay", "canary", "withdrawn"] == stages(customers)[:3]
