"""Tests of reading many rollouts at once, with their attempts and spans."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio

import pytest

from agl.contracts import Recording, RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Outcome, Rollout
from agl.stores import all_spans, read_recordings
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import (
    TWO_ATTEMPTS,
    claim_one,
    make_call,
    make_reward_span,
    make_rollout,
    make_span,
    outcome_of,
    start_one,
)


async def _finish_twice(store: Store) -> Rollout:
    """Run a rollout that fails and then succeeds, with spans of both attempts, and a reward without an attempt."""
    first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS))
    await store.finish([outcome_of(first, "failed", spans=[make_span(first, name="one")])])
    second = await claim_one(store)
    spans = [make_span(second, name=str(at), call=make_call(range(20 * at), range(9))) for at in range(3)]
    (done,) = await store.finish([outcome_of(second, spans=spans)])
    await store.append_spans([make_reward_span(done.rollout_id, "", 1.0)])
    return done


async def _lose(store: Store) -> None:
    """Claim a rollout, record a span, give the attempt back, and record a late span; the rollout is queued again."""
    claim = await claim_one(store)
    await store.append_spans([make_span(claim, name="work")])
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="lost")])
    await store.append_spans([make_span(claim, name="late")])


async def _one_by_one(store: Store, rollout: Rollout) -> Recording:
    """Read the recording of a rollout with one request for each part."""
    attempts = await store.attempts(rollout.rollout_id)
    ids = ["", *(attempt.attempt_id for attempt in attempts)]
    spans = [span for each in ids for span in await all_spans(store, rollout.rollout_id, each)]
    return Recording(rollout=rollout, attempts=attempts, spans=spans)


class RecordingTests:
    """Tests of reading the records that episodes are built from."""

    @store_test
    async def test_recordings_are_what_the_single_reads_give(self, store: Store) -> None:
        done = [await _finish_twice(store) for _ in range(3)]
        queued = (await store.enqueue([make_rollout()]))[0]
        found = await store.recordings(RolloutQuery())
        assert [*done, queued] == [recording.rollout for recording in found]
        for recording in found:
            rollout_id = recording.rollout.rollout_id
            assert await store.attempts(rollout_id) == recording.attempts
            assert await store.spans(rollout_id) == recording.spans
            assert recording.is_whole

    @store_test
    async def test_recordings_hold_the_spans_that_are_asked_for(self, store: Store) -> None:
        done = await _finish_twice(store)
        query = RolloutQuery(ids=(done.rollout_id,))
        (none,) = await store.recordings(query, spans="none")
        assert ([], ["failed", "succeeded"]) == (none.spans, [attempt.status for attempt in none.attempts])
        (everything,) = await store.recordings(query, spans="all")
        assert ["evaluate", "one", "0", "1", "2"] == [span.name for span in everything.spans]

    @store_test
    async def test_recordings_follow_the_query(self, store: Store) -> None:
        done = [await _finish_twice(store) for _ in range(4)]
        await start_one(store, make_rollout(experiment="other"))
        query = RolloutQuery(experiment="", status=("succeeded",), after=done[0].rollout_id, limit=2)
        assert done[1:3] == [recording.rollout for recording in await store.recordings(query)]
        ids = tuple(rollout.rollout_id for rollout in done[::-1])
        assert done == [recording.rollout for recording in await store.recordings(RolloutQuery(ids=ids))]
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.recordings(RolloutQuery(ids=(ids[0], "ro-nobody")))

    @store_test
    async def test_page_of_recordings_ends_when_it_is_large_enough(self, store: Store) -> None:
        done = [await _finish_twice(store) for _ in range(5)]
        pages: list[list[Rollout]] = []
        while page := await store.recordings(
            RolloutQuery(after=pages[-1][-1].rollout_id if pages else ""), max_bytes=1 if len(pages) < 2 else 10_000_000
        ):
            pages.append([recording.rollout for recording in page])
        assert [done[:1], done[1:2], done[2:]] == pages

    @store_test
    async def test_all_pages_of_recordings_are_read_with_all_spans(self, store: Store) -> None:
        done = [await _finish_twice(store) for _ in range(3)]
        for query in (RolloutQuery(limit=2), RolloutQuery(ids=tuple(rollout.rollout_id for rollout in done))):
            found = [recording async for recording in read_recordings(store, query, spans="all")]
            assert done == [recording.rollout for recording in found]
            assert [5, 5, 5] == [len(recording.spans) for recording in found]

    @store_test
    async def test_pages_of_recordings_hold_lost_attempts_and_late_spans_as_the_single_reads_do(
        self, store: Store
    ) -> None:
        await store.enqueue([make_rollout(experiment="e") for _ in range(9)])
        for number in range(9):
            for _ in range(number % 3):
                await _lose(store)
            claim = await claim_one(store)
            if number % 4:
                await store.finish([outcome_of(claim, spans=[make_span(claim, name="last")])])
        await store.enqueue([make_rollout(experiment="e"), make_rollout()])
        for query in (RolloutQuery(limit=2), RolloutQuery(experiment="e", limit=4, sort="status")):
            rollouts = await store.rollouts(RolloutQuery(experiment=query.experiment, sort=query.sort))
            single = [await _one_by_one(store, rollout) for rollout in rollouts]
            assert single == [recording async for recording in read_recordings(store, query, spans="all")]
            assert {True, False} == {span.is_late for recording in single for span in recording.spans}
            assert {1, 2, 3} <= {len(recording.attempts) for recording in single}

    @store_test
    async def test_pages_of_recordings_leave_out_nothing_while_others_write(self, store: Store) -> None:
        asked = await store.enqueue([make_rollout(experiment="e") for _ in range(60)])
        query = RolloutQuery(experiment="e", limit=7)

        async def work() -> None:
            for number in range(60):
                if number % 5 == 0:
                    await _lose(store)
                claim = await claim_one(store)
                await store.finish([outcome_of(claim, spans=[make_span(claim)])])
                await asyncio.sleep(0)  # a memory store never yields to the event loop

        working = asyncio.create_task(work())
        while True:
            is_over = working.done()
            found = [recording.rollout.rollout_id async for recording in read_recordings(store, query, spans="all")]
            assert [rollout.rollout_id for rollout in asked] == found
            if is_over:
                break
            await asyncio.sleep(0)
        await working
