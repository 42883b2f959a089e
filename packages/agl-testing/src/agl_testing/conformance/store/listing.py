"""Tests of listing rollouts: sorting, paging, and searching for a text."""

# ruff: noqa: D102  # the names of the tests say what holds

from msgspec.structs import replace

from agl.contracts import RolloutQuery, Store
from agl.schemas import Rollout
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import claim_one, make_rollout, outcome_of

SORTS = ("rollout_id", "created_at", "finished_at", "status")


class ListTests:
    """Tests of sorting rollouts, paging through them, and searching for a text in them."""

    @store_test
    async def test_rollouts_are_sorted_and_paged_in_both_directions(self, store: Store) -> None:
        await _fill(store)
        everything = await store.rollouts(RolloutQuery())
        for sort in SORTS:
            for is_newest_first in (False, True):
                expected = sorted(
                    everything,
                    key=lambda rollout: (getattr(rollout, sort), rollout.rollout_id),
                    reverse=is_newest_first,
                )
                for query in _queries():
                    query = replace(query, sort=sort, is_newest_first=is_newest_first)
                    wanted = [rollout for rollout in expected if _fits(rollout, query)]
                    assert wanted[: query.limit] == await store.rollouts(query)
                    assert wanted == await _pages(store, query)
                    assert len(wanted) == await store.count_rollouts(query)

    @store_test
    async def test_pages_go_on_where_they_ended_after_the_last_rollout_changed(self, store: Store) -> None:
        await _fill(store)
        for sort in SORTS:
            query = RolloutQuery(sort=sort, status=("succeeded", "failed", "queued"), limit=5)
            before = await _pages(store, query)
            page = await store.rollouts(query)
            query = query.next(page[-1])
            if page[-1].is_finished:
                await store.delete([page[-1].rollout_id])
            else:
                await store.cancel([page[-1].rollout_id])
            assert before[5:] == await _pages(store, query)

    @store_test
    async def test_rollouts_with_a_text_in_id_or_task_are_found(self, store: Store) -> None:
        tasks = [{"q": "a refund"}, {"q": {"deep": ["refund", 1]}}, "no", {"refund": True}, {"q": "Refund ü"}]
        asked = [replace(make_rollout(), task=task) for task in tasks]
        asked[2] = replace(asked[2], rollout_id="ro-99999999-refund")
        await store.enqueue([*asked, *(make_rollout() for _ in range(20))])
        query = RolloutQuery(contains="refund", limit=2)
        expected = sorted((asked[at] for at in (0, 1, 2, 3)), key=lambda rollout: rollout.rollout_id)
        found = await _pages(store, query)
        assert [rollout.rollout_id for rollout in expected] == [rollout.rollout_id for rollout in found]
        assert 4 == await store.count_rollouts(query)
        assert [asked[4].task] == [each.task for each in await store.rollouts(RolloutQuery(contains="d ü"))]
        newest = replace(query, sort="created_at", is_newest_first=True)
        assert 4 == len(await _pages(store, newest))
        assert [] == await store.rollouts(RolloutQuery(contains="experiment"))


async def _fill(store: Store) -> None:
    """Write rollouts whose orders by creation, end and status differ from the order of ids; some times are equal."""
    made = [
        replace(make_rollout(experiment="ab"[at % 2], mode="val" if at % 3 == 0 else "train"), created_at=at * 7 % 11)
        for at in range(1, 25)
    ]
    await store.enqueue([replace(rollout, created_at=1.0 + rollout.created_at) for rollout in made])
    claims = [await claim_one(store) for _ in range(18)]
    for at in (7, 2, 11, 3, 15, 0, 9, 5, 13):
        await store.finish([outcome_of(claims[at], "failed" if at % 3 == 0 else "succeeded")])


def _queries() -> list[RolloutQuery]:
    return [
        RolloutQuery(limit=4),
        RolloutQuery(experiment="a", limit=3),
        RolloutQuery(mode="val", status=("succeeded", "running"), limit=2),
        RolloutQuery(experiment="b", mode="train", status=("queued",), limit=1),
    ]


def _fits(rollout: Rollout, query: RolloutQuery) -> bool:
    return (
        query.experiment in (None, rollout.experiment)
        and query.mode in (None, rollout.mode)
        and (not query.status or rollout.status in query.status)
    )


async def _pages(store: Store, query: RolloutQuery) -> list[Rollout]:
    found: list[Rollout] = []
    while page := await store.rollouts(query):
        assert len(page) <= query.limit
        found += page
        query = query.next(page[-1])
    return found
