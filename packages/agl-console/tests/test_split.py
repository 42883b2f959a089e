"""The arms of a split of served traffic, as the gateway records them, in the view of a resource."""

from typing import Any

import msgspec

from agl.contracts import LabelMove
from agl.schemas import ErrorInfo, Json, Outcome, PromptTemplate, ResourceVersion, Reward, Rollout, Span
from agl.stores import MemoryStore
from agl_console.versions import VersionsFilter, split_part, versions_view
from agl_gateway.traffic.splits import parse_split, pins_of, place_rollout

from .conftest import Open

SPLIT = parse_split("production=0.75,candidate=0.25")


async def store_with_versions() -> MemoryStore:
    store = MemoryStore()
    texts = {"v1": "a", "v2": "b"}
    await store.publish(
        [
            *(ResourceVersion(name="style", version=v, resource=PromptTemplate(template=t)) for v, t in texts.items()),
            ResourceVersion(name="same", version="s", resource=PromptTemplate(template="s")),
        ]
    )
    for name, label, version in [
        ("style", "production", "v1"),
        ("style", "candidate", "v2"),
        ("same", "production", "s"),
    ]:
        await store.move_label(LabelMove(name=name, label=label, version=version))
    return store


async def place(store: MemoryStore, count: int, *, begin: str = "r") -> dict[str, list[str]]:
    """Enqueue rollouts as a gateway with a split does; return the rollout ids by arm."""
    pins = await pins_of(store, list(SPLIT.shares))
    arms: dict[str, list[str]] = {label: [] for label in SPLIT.shares}
    for number in range(count):
        rollout = Rollout(rollout_id=f"{begin}-{number:03d}", task={})
        await store.enqueue([place_rollout(rollout, msgspec.structs.replace(SPLIT, versions=pins))])
        arms[SPLIT.arm_of(rollout.rollout_id)].append(rollout.rollout_id)
    return arms


async def finish(store: MemoryStore, rewards: dict[str, float | None], *, failed: str = "") -> None:
    """End all queued rollouts, each with the reward in ``rewards`` if there is one."""
    while claims := await store.claim(worker="w"):
        (claim,) = claims
        rollout_id, attempt_id = claim.rollout.rollout_id, claim.attempt.attempt_id
        reward = rewards.get(rollout_id)
        ids: dict[str, Any] = {"rollout_id": rollout_id, "attempt_id": attempt_id, "span_id": "0" * 16}
        spans = () if reward is None else (Span(name="evaluate", reward=Reward(value=reward), **ids),)
        error = ErrorInfo(type="ValueError", message="no") if rollout_id == failed else None
        status = "failed" if error else "succeeded"
        await store.finish([Outcome(attempt_id=attempt_id, status=status, error=error, spans=spans)])


async def test_arms_have_their_versions_shares_and_rewards(opened: Open) -> None:
    store = await store_with_versions()
    arms = await place(store, 40)
    candidates, baseline = arms["candidate"], arms["production"]
    assert len(candidates) > 4
    rewards: dict[str, float | None] = dict.fromkeys(baseline, 0.5)
    rewards |= {name: 1.0 for name in candidates[2:]}
    await finish(store, rewards, failed=candidates[0])  # the second candidate has no reward
    await place(store, 3, begin="waits")
    async with opened(store) as client:
        answer = await client.get("/versions/style")
        page = await answer.text()
        other = await (await client.get("/versions/same")).text()
    part = await split_part(store, "style")
    assert part is not None
    first, second = part.arms
    assert ("production", "v1", len(baseline), 0, len(baseline)) == _start(first)
    assert ("candidate", "v2", len(candidates), 1, len(candidates) - 1) == _start(second)
    rewarded = len(candidates) - 1
    assert (0.5, (rewarded - 1) / rewarded) == (first.mean, second.mean)
    assert first.low is not None
    assert first.high is not None
    assert 0.4 < first.low < 0.5 < first.high < 0.6  # equal rewards do not make the mean certain
    assert second.low is not None
    assert second.high is not None
    assert second.low < (rewarded - 1) / rewarded < second.high
    assert {"production": 0.75, "candidate": 0.25} == part.shares
    assert 43 == part.looked_through
    assert "<h2>Traffic</h2>" in page
    assert "<h2>Traffic</h2>" not in other  # both arms have its only version


async def test_traffic_between_other_versions_is_not_counted() -> None:
    store = await store_with_versions()
    await finish(store, dict.fromkeys((await place(store, 10, begin="old"))["production"], 0.0))
    await store.publish([ResourceVersion(name="style", version="v3", resource=PromptTemplate(template="c"))])
    await store.move_label(LabelMove(name="style", label="candidate", version="v3"))
    await finish(store, dict.fromkeys((await place(store, 10, begin="new"))["production"], 1.0))
    view = await versions_view(store, "style", VersionsFilter())
    assert view.split is not None
    assert ["v1", "v3"] == [arm.versions["style"] for arm in view.split.arms]
    assert 10 == sum(arm.rollouts for arm in view.split.arms)
    assert 1.0 == view.split.arms[0].mean


async def test_foreign_metadata_is_no_split() -> None:
    store = await store_with_versions()
    foreign: list[Json] = ["train", {"arm": "x"}, {"arm": "x", "shares": {}, "versions": {}}, None, 3]
    for number, value in enumerate(foreign):
        await store.enqueue([Rollout(rollout_id=f"r-{number}", task={}, metadata={"split": value})])
    assert await split_part(store, "style") is None


async def test_page_of_a_conversation_shows_its_user_and_its_arm(opened: Open) -> None:
    store = await store_with_versions()
    split = msgspec.structs.replace(SPLIT, versions=await pins_of(store, list(SPLIT.shares)))
    await store.enqueue([place_rollout(Rollout(rollout_id="r-1", task={}, metadata={"user": "<ann>"}), split)])
    async with opened(store) as client:
        page = await (await client.get("/rollouts/r-1")).text()
    assert "user &lt;ann&gt;" in page
    assert f"arm {SPLIT.arm_of('r-1')}, " in page


def _start(arm: Any) -> tuple[Any, ...]:
    return arm.label, arm.versions["style"], arm.rollouts, arm.failed, arm.rewarded
