"""A serving split: shares, placements, the rewards of its arms, and promotion on that evidence."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from agl import Gate
from agl.contracts import RolloutQuery, Store
from agl.errors import ConfigError
from agl.schemas import AttemptStatus, JsonResource, Outcome, PromptTemplate, ResourceVersion, Reward, Rollout, Span
from agl.stores import MemoryStore
from agl_gateway.traffic.splits import (
    Placed,
    SplitReport,
    Splitter,
    arm_of,
    check_labels,
    compare_placed,
    parse_split,
    pins_of,
    place_rollout,
    split_report,
)
from agl_inspect.records import labels as labels
from agl_inspect.records.splits import Pins, ServedSplit, placement_of
from agl_inspect.statistics import interval
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

SPLIT = parse_split("production=0.5,candidate=0.5")
VERSIONS = [
    *(ResourceVersion(name="prompt", version=f"v{i}", resource=PromptTemplate(template=f"{i}")) for i in (1, 2, 3)),
    *(ResourceVersion(name="tools", version=f"t{i}", resource=JsonResource(value=i)) for i in (1, 2)),
]


def in_split(rollout: Rollout, split: ServedSplit, pins: Pins) -> Rollout:
    return place_rollout(rollout, msgspec.structs.replace(split, versions=pins))


async def labelled(store: Store, **pointing: str) -> None:
    """Publish the versions that the labels name; `production="prompt@v1"` points a label at a version."""
    await store.publish(VERSIONS)
    for label, target in pointing.items():
        name, _, version = target.partition("@")
        await labels.move(store, name, label, version)


async def serve(
    store: Store, rewards: dict[str, Sequence[float | None]], *, name: str = "r", experiment: str = ""
) -> None:
    """Finish one rollout per reward in each arm; ``None`` means without a reward, ``nan`` a failed rollout."""
    pins = await pins_of(store, list(SPLIT.shares))
    waiting = {label: list(values) for label, values in rewards.items()}
    for index in range(10_000):
        plain = Rollout(rollout_id=f"{name}-{index:05d}", task=index, experiment=experiment)
        rollout = in_split(plain, SPLIT, pins)
        placement = placement_of(rollout)
        assert placement is not None
        if not waiting.get(placement.arm):
            if not any(waiting.values()):
                return
            continue
        value = waiting[placement.arm].pop(0)
        await store.enqueue([rollout])
        (claim,) = await store.claim(worker="w")
        attempt = claim.attempt
        spans = [
            Span(
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                span_id="0" * 16,
                name="r",
                reward=Reward(value=value, source="evaluator"),
            )
        ]
        is_failed = value is not None and math.isnan(value)
        outcome = Outcome(
            attempt_id=attempt.attempt_id,
            status="failed" if is_failed else "succeeded",
            spans=() if is_failed or value is None else tuple(spans),
        )
        await store.finish([outcome])


def test_a_tenth_of_a_thousand_ids_lands_in_the_candidate_arm() -> None:
    split = parse_split("production=0.9,candidate=0.1")
    count = sum(split.arm_of(f"ro-{i}") == "candidate" for i in range(10_000))
    assert 900 < count < 1100  # 3.3 standard deviations


def test_labels_divide_the_ids_by_their_shares_in_their_order() -> None:
    split = parse_split("production=0.2,candidate=0.3,canary=0.5")
    ids = [f"ro-{i}" for i in range(10_000)]
    counts = Counter(map(split.arm_of, ids))
    for label, share in split.shares.items():
        assert abs(counts[label] / 10_000 - share) < 0.02  # 4 standard deviations
    merged = parse_split("production=0.5,canary=0.5")
    assert ["canary" == split.arm_of(each) for each in ids] == ["canary" == merged.arm_of(each) for each in ids]


def test_arm_of_an_id_never_changes_between_releases() -> None:
    split = parse_split("production=0.9,candidate=0.1")
    assert ["ro-14", "ro-16", "ro-24"] == [f"ro-{i}" for i in range(40) if split.arm_of(f"ro-{i}") == "candidate"]


@given(st.text(), st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_growing_candidate_keeps_whom_it_had(key: str, share: float, more: float) -> None:
    before = ServedSplit(shares={"production": 1 - share, "candidate": share}, versions={})
    after = ServedSplit(shares={"production": 1 - share - more, "candidate": share + more}, versions={})
    if before.arm_of(key) == "candidate":
        assert "candidate" == after.arm_of(key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("production=0.9,candidate=0.2", "add up to 1.1"),
        ("production=1", "needs two arms or more, with commas between them"),
        ("production=0.5;candidate=0.5", "with commas between them; write"),
        ("production=0.9,candidate=x", r"^--split 'production=0.9,.*': the share of 'candidate' is 'x', not a number"),
        ("production=0.9,candidate=1", "the share of 'candidate' is '1', not a number between 0 and 1"),
        ("production=0.9,candidate=0", "the share of 'candidate' is '0', not a number between 0 and 1"),
        ("production=0.5=0.5,candidate=0.5", "the share of 'production' is '0.5=0.5', not a number"),
        ("production=0.9,candidate=nan", "'nan', not a number"),
        ("production=0.5,production=0.5", "the label 'production' is given twice; write"),
        ("production=0.5,a/b=0.5", "the label 'a/b' may hold letters, digits, '_', '.' and '-' only; write"),
        ("", "needs two arms or more"),
    ],
)
def test_bad_split_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_split(text)


@pytest.mark.parametrize(
    ("pointing", "message"),
    [
        ({"production": "prompt@v1"}, r"'candidate' names no version .* labels are \['production'\]"),
        ({}, "'production' names no version .* labels are none"),
        ({"production": "prompt@v1", "candidate": "tools@t2"}, "'tools' has no label 'production'"),
    ],
)
def test_label_that_names_nothing_is_refused(pointing: dict[str, str], message: str) -> None:
    async def body() -> None:
        store = MemoryStore()
        await labelled(store, **pointing)
        await check_labels(store, ["production", "candidate"])

    with pytest.raises(ConfigError, match=message):
        asyncio.run(body())


async def test_resource_with_labels_of_another_use_may_lack_the_first_label() -> None:
    store = MemoryStore()
    await labelled(store, production="prompt@v1", candidate="prompt@v2", old="tools@t1")
    await check_labels(store, ["production", "candidate"])


def test_rollout_gets_the_versions_of_its_arm_and_keeps_what_it_pinned() -> None:
    async def body() -> dict[str, dict[str, str]]:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v2")
        await labels.move(store, "tools", "production", "t1")
        return await pins_of(store, ["production", "candidate"])

    pins = asyncio.run(body())
    for index in range(20):
        rollout = in_split(Rollout(rollout_id=f"ro-{index}", task=0), SPLIT, pins)
        arm = SPLIT.arm_of(f"ro-{index}")
        assert {"prompt": {"production": "v1", "candidate": "v2"}[arm], "tools": "t1"} == rollout.resources
        assert rollout == in_split(rollout, SPLIT, pins)
        own = Rollout(rollout_id=f"ro-{index}", task=0, resources={"prompt": "v3"})
        assert own == in_split(own, SPLIT, pins)
        other = in_split(Rollout(rollout_id=f"ro-{index}", task=0, resources={"tools": "t2"}), SPLIT, pins)
        assert "t2" == other.resources["tools"]


def test_rollouts_of_one_conversation_share_an_arm() -> None:
    pins = {"production": {"prompt": "v1"}, "candidate": {"prompt": "v2"}}
    for conversation in ("a", "b", "c", "d"):
        rollouts = [
            in_split(Rollout(rollout_id=f"ro-{i}", task=0, metadata={"conversation": conversation}), SPLIT, pins)
            for i in range(8)
        ]
        assert 1 == len({rollout.resources["prompt"] for rollout in rollouts})


def test_report_counts_what_was_placed_between_the_present_versions() -> None:
    async def body() -> Any:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v3")
        await serve(store, {"production": [1.0] * 3, "candidate": [1.0] * 3}, name="before")
        await labels.move(store, "prompt", "candidate", "v2")
        await serve(store, {"production": [0.4, 0.6, None], "candidate": [0.8, math.nan, 1.0]})
        return await split_report(store, await pins_of(store, LABELS))

    report = asyncio.run(body())
    production, candidate = report.arms
    assert ({"prompt": "v1"}, 3, 0, 1, 0.5) == (
        production.versions,
        production.rollouts,
        production.failed,
        production.unrewarded,
        production.mean,
    )
    assert ({"prompt": "v2"}, 3, 1, pytest.approx(0.6)) == (
        candidate.versions,
        candidate.rollouts,
        candidate.failed,
        candidate.mean,
    )
    assert pytest.approx(1.2) == report.against["candidate"].policy_improvement_ratio


async def finish(store: Store, rollout: Rollout, *, status: AttemptStatus = "succeeded") -> None:
    """Run a rollout without a reward."""
    await store.enqueue([rollout])
    (claim,) = await store.claim(worker="w")
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status=status)])


LABELS = ["production", "candidate"]


def test_report_counts_every_failure_and_every_missing_reward() -> None:
    async def body() -> SplitReport:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v2")
        await serve(store, {"production": [math.nan, math.nan, 1.0], "candidate": [None, None, 0.5]})
        return await split_report(store, await pins_of(store, LABELS))

    production, candidate = asyncio.run(body()).arms
    assert (3, 2, 0, 3) == (production.rollouts, production.failed, production.unrewarded, production.rewarded)
    assert (3, 0, 2, 1) == (candidate.rollouts, candidate.failed, candidate.unrewarded, candidate.rewarded)
    assert (pytest.approx(1 / 3), 0.5) == (production.mean, candidate.mean)


def test_report_reads_one_experiment_or_all() -> None:
    async def body() -> list[SplitReport]:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v2")
        await serve(store, {"production": [1.0] * 3, "candidate": [1.0] * 3}, name="mine", experiment="mine")
        await serve(store, {"production": [0.0], "candidate": [0.0]}, name="other", experiment="other")
        pins = await pins_of(store, LABELS)
        return [await split_report(store, pins, experiment=name) for name in ("mine", "other", None)]

    reports = asyncio.run(body())
    assert [[3, 3], [1, 1], [4, 4]] == [[arm.rollouts for arm in report.arms] for report in reports]
    assert [1.0, 0.0, 0.75] == [report.arms[0].mean for report in reports]


def test_report_weighs_each_unit_by_the_share_of_its_arm() -> None:
    old, new = [0.1, 0.2, 0.4], [0.5, 0.9]

    async def body() -> tuple[SplitReport, list[Rollout]]:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v2")
        await serve(store, {"production": old, "candidate": new})
        return await split_report(store, await pins_of(store, LABELS), error=0.2), await store.rollouts(
            RolloutQuery(sort="created_at")
        )

    report, rollouts = asyncio.run(body())
    gate, waiting = Gate(error=0.1), {"production": [*old], "candidate": [*new]}
    for rollout in rollouts:
        gate.arrive(waiting[arm_of(rollout)].pop(0), is_new=arm_of(rollout) == "candidate", share=0.5)
    against = report.against["candidate"]
    assert against is not None
    assert (gate.mean, gate.evidence, gate.lower) == (against.difference, against.evidence, against.low)
    assert (5, 10, 3, 2, True) == (
        against.pairs,
        against.threshold,
        against.old_count,
        against.new_count,
        against.is_split,
    )
    assert [interval(rewards) for rewards in (old, new)] == [(arm.low, arm.high) for arm in report.arms]


PINS = {"production": {"prompt": "v1"}, "candidate": {"prompt": "v2"}}


def placed(
    number: int, arm: str, reward: float | None, *, shares: dict[str, float] | None = None, **named: str
) -> Placed:
    placement = {"arm": arm, "shares": shares or SPLIT.shares, "versions": PINS}
    return Placed(Rollout(rollout_id=f"r{number}", task=0, metadata={"split": placement, **named}), arm, reward)


def test_user_counts_once_by_the_mean_of_all_conversations() -> None:
    found = [
        placed(0, "production", 0.2, user="ann"),
        placed(1, "candidate", 0.9, user="bob"),
        placed(2, "production", 0.6, user="ann"),
        placed(3, "production", None, user="ann"),
        placed(4, "candidate", 0.7, user="ann"),  # the shares grew, and ann came into the other arm
    ]

    once = compare_placed(found, "production", "candidate", error=0.05)

    alike = [placed(0, "production", 0.4), placed(1, "candidate", 0.9)]
    same = compare_placed(alike, "production", "candidate", error=0.05)
    assert once is not None
    assert same is not None
    assert (2, 2, 1) == (once.pairs, once.old_count, once.new_count)
    assert (same.evidence, same.difference, same.low) == (once.evidence, once.difference, once.low)


def test_arms_of_a_wider_split_are_compared_in_pairs() -> None:
    shares = {"production": 0.6, "candidate": 0.2, "canary": 0.2}
    wide = [placed(n, arm, n / 8, shares=shares) for n, arm in enumerate(["production", "candidate", "canary"] * 2)]
    narrow = [
        placed(n, arm, n / 8, shares={"production": 0.75, "candidate": 0.25})
        for n, arm in enumerate(["production", "candidate", ""] * 2)
        if arm
    ]

    found, expected = (compare_placed(each, "production", "candidate", error=0.05) for each in (wide, narrow))

    assert expected == found


@pytest.mark.parametrize("named", [{"user": "ann"}, {"user": "ann", "conversation": "other"}])
def test_all_conversations_of_a_user_get_the_same_arm(named: dict[str, str]) -> None:
    split = msgspec.structs.replace(SPLIT, versions=PINS)
    arms = {
        place_rollout(Rollout(rollout_id=f"r{n}", task=0, metadata=dict(named)), split).resources["prompt"]
        for n in range(20)
    }

    assert 1 == len(arms)


def test_arm_with_a_single_reward_has_a_mean_and_no_interval() -> None:
    async def body() -> SplitReport:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v2")
        await serve(store, {"production": [0.1, 0.2], "candidate": [0.5]})
        return await split_report(store, await pins_of(store, LABELS))

    report = asyncio.run(body())
    production, candidate = report.arms
    assert (0.5, None, None) == (candidate.mean, candidate.low, candidate.high)
    assert interval([0.1, 0.2]) == (production.low, production.high)
    assert (3, 1) == (report.against["candidate"].pairs, report.against["candidate"].new_count)


def test_report_leaves_out_what_is_unplaced_cancelled_or_placed_between_other_labels() -> None:
    """A split of three arms compares every pair of them; a split of two arms says nothing about a third."""
    wide = parse_split("production=0.3,candidate=0.3,canary=0.4")

    async def body() -> list[SplitReport]:
        store = MemoryStore()
        await labelled(store, production="prompt@v1", candidate="prompt@v2", canary="prompt@v3")
        pins = await pins_of(store, list(wide.shares))
        for index in range(30):
            await finish(store, in_split(Rollout(rollout_id=f"wide-{index}", task=0), wide, pins))
            narrow = {label: pins[label] for label in LABELS}
            await finish(store, in_split(Rollout(rollout_id=f"narrow-{index}", task=0), SPLIT, narrow))
        await finish(store, Rollout(rollout_id="unplaced", task=0))
        for index in range(9):
            cancelled = in_split(Rollout(rollout_id=f"cancelled-{index}", task=0), wide, pins)
            await finish(store, cancelled, status="cancelled")
        return [await split_report(store, await pins_of(store, names)) for names in (LABELS, list(wide.shares))]

    placed = Counter(wide.arm_of(f"wide-{index}") for index in range(30))
    narrow = Counter(SPLIT.arm_of(f"narrow-{index}") for index in range(30))
    two, three = asyncio.run(body())
    assert [placed[label] + narrow[label] for label in LABELS] == [arm.rollouts for arm in two.arms]
    assert [placed[label] for label in wide.shares] == [arm.rollouts for arm in three.arms]


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs `agl resources split` on a store with served arms: ``command("split")``."""
    path = tmp_path / "runs.db"

    def call(*arguments: str, rewards: dict[str, Sequence[float | None]] | None = None, tools: bool = False) -> Result:
        if rewards is not None:

            async def make() -> None:
                store = SQLiteStore(f"sqlite:///{path}")
                await labelled(store, production="prompt@v1", candidate="prompt@v2")
                if tools:
                    await labels.move(store, "tools", "production", "t1")
                    await labels.move(store, "tools", "candidate", "t2")
                await serve(store, rewards)
                await store.close()

            asyncio.run(make())
        return CliRunner().invoke(cli, ["resources", *arguments, "--store", f"sqlite:///{path}"])

    return call


LOW = [0.1, 0.2, 0.1, 0.2] * 5
HIGH = [0.8, 0.9, 0.8, 0.9] * 5


@pytest.mark.parametrize(
    ("rewards", "options", "status", "message"),
    [
        ({"production": LOW, "candidate": HIGH}, (), 0, "better, evidence 1,579 to 1: difference +0.6999"),
        ({"production": LOW, "candidate": HIGH}, ("--min-gain", "0.7"), 1, "cannot be told apart"),
        ({"production": LOW, "candidate": HIGH}, ("--error", "1e-5"), 1, "164,493 to 1 needed"),
        ({"production": LOW, "candidate": LOW}, (), 1, "not shown to be better"),
        ({"production": HIGH, "candidate": LOW}, (), 1, "worse, evidence"),
        ({"production": LOW, "candidate": [*HIGH, -3.0]}, (), 1, "the reward -3 is outside the range from 0 to 1"),
    ],
    ids=["better", "gain too small", "evidence too weak", "equal", "worse", "out of range"],
)
def test_arm_is_promoted_only_at_strong_evidence(
    command: Callable[..., Result],
    rewards: dict[str, Sequence[float | None]],
    options: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    done = command("split", "--promote", "prompt", *options, rewards=rewards)
    assert (status, True) == (done.exit_code, message in done.output), done.output
    now = "v1" if status else "v2"
    assert f"labels: {'candidate, ' if not status else ''}production" in command("show", "prompt", now).output


def test_split_prints_both_arms_and_the_ratio(command: Callable[..., Result]) -> None:
    done = command("split", rewards={"production": LOW, "candidate": HIGH})
    assert "production  20        0       0          0.1500" in done.output
    assert "candidate against production: better, evidence 1,579 to 1: difference +0.6999" in done.output
    assert "policy_improvement_ratio 5.667, 20 and 20" in done.output
    report = json.loads(command("split", "--json").output)
    assert ["prompt"] == report["differing"]
    assert pytest.approx(0.85 / 0.15) == report["against"]["candidate"]["policy_improvement_ratio"]


def test_arms_that_differ_in_two_resources_promote_neither(command: Callable[..., Result]) -> None:
    arguments = ("split", "--promote", "prompt")
    done = command(*arguments, rewards={"production": LOW, "candidate": HIGH}, tools=True)
    assert (1, True) == (done.exit_code, "differ in prompt, tools" in done.output), done.output


def test_promoted_arm_leaves_nothing_to_compare(command: Callable[..., Result]) -> None:
    arguments = ("split", "--promote", "prompt")
    command(*arguments, rewards={"production": LOW, "candidate": HIGH})
    assert "the same version of every resource" in command("split").output
    again = command(*arguments)
    assert (1, True) == (again.exit_code, "differ in no resource" in again.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("split", "production", "production"), "cannot be compared"),
        (("split", "production", "canary"), "'canary' names no version"),
        (("split", "--min-gain", "0.1"), "--min-gain would do nothing without --promote"),
        (("split", "production", "candidate", "canary", "--promote", "prompt"), "compares two arms and got 3"),
    ],
)
def test_wrong_use_is_refused(command: Callable[..., Result], arguments: tuple[str, ...], message: str) -> None:
    command("list", rewards={})
    done = command(*arguments)
    assert (1, True) == (done.exit_code, message in done.output), done.output


async def test_rollout_keeps_the_arm_that_it_was_queued_with() -> None:
    store = MemoryStore()
    await labelled(store, production="prompt@v1", candidate="prompt@v2")
    splitter = Splitter(store, SPLIT)
    assert {"production": {"prompt": "v1"}, "candidate": {"prompt": "v2"}} == await pins_of(store, LABELS)
    plain = [Rollout(rollout_id=f"r-{index}", task=index) for index in range(20)]
    first = await splitter.enqueue(plain)
    assert {"production": "v1", "candidate": "v2"} == {arm_of(each): each.resources["prompt"] for each in first}
    await labels.move(store, "prompt", "candidate", "v3")
    again = await splitter.enqueue([*plain, Rollout(rollout_id="s", task=0)])
    assert first == again[:-1]
    assert (await pins_of(store, LABELS))[arm_of(again[-1])] == again[-1].resources
    assert "" == arm_of(plain[0])
    await store.enqueue([Rollout(rollout_id="t", task=0)])  # without an arm, it stays so
    assert {} == (await splitter.enqueue([Rollout(rollout_id="t", task=0)]))[0].resources
