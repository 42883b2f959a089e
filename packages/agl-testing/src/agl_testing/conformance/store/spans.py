"""Tests of spans and the change feed: each record comes back once and in order."""

# ruff: noqa: D102  # the names of the tests say what holds

import random
import time

import msgspec
import pytest

from agl.contracts import Store
from agl.errors import NotFoundError, StoreError
from agl.schemas import Claim, Span, new_span_id
from agl_testing.conformance.store.case import store_test
from agl_testing.conformance.store.leases import WakeUps
from agl_testing.stores.samples import (
    TWO_ATTEMPTS,
    claim_one,
    finish_one,
    make_call,
    make_reward_span,
    make_rollout,
    make_span,
    outcome_of,
    start_one,
)


class SpanTests:
    """Tests of appending and reading spans."""

    @store_test
    async def test_spans_come_back_in_order_with_every_field(self, store: Store) -> None:
        claim = await start_one(store)
        asked = [
            make_span(claim, name="plain"),
            make_span(claim, name="chat", call=make_call(range(50), range(7))),
            make_reward_span(claim.rollout.rollout_id, claim.attempt.attempt_id, 0.25),
        ]
        await store.append_spans(asked)
        read = await store.spans(claim.rollout.rollout_id)
        assert [1, 2, 3] == [s.sequence for s in read]
        assert asked == [msgspec.structs.replace(s, sequence=0) for s in read]

    @store_test
    async def test_span_appended_again_is_ignored(self, store: Store) -> None:
        claim = await start_one(store)
        span = make_span(claim, name="first")
        await store.append_spans([span, span])
        await store.append_spans([msgspec.structs.replace(span, name="second"), make_span(claim, name="third")])
        assert ["first", "third"] == [s.name for s in await store.spans(claim.rollout.rollout_id)]

    @store_test
    async def test_finish_appends_its_spans_after_the_earlier_ones(self, store: Store) -> None:
        claim = await start_one(store)
        early, last = make_span(claim, name="early"), make_span(claim, name="last")
        await store.append_spans([early])
        await store.finish([outcome_of(claim, spans=[early, last])])
        read = await store.spans(claim.rollout.rollout_id)
        assert [("early", False), ("last", False)] == [(s.name, s.is_late) for s in read]

    @store_test
    async def test_spans_page_by_sequence(self, store: Store) -> None:
        claim = await start_one(store)
        await store.append_spans([make_span(claim, name=str(i), call=make_call(range(i), [i])) for i in range(25)])
        pages: list[Span] = []
        while page := await store.spans(claim.rollout.rollout_id, after=pages[-1].sequence if pages else 0, limit=10):
            assert len(page) <= 10
            pages += page
        assert [str(i) for i in range(25)] == [s.name for s in pages]
        assert pages == await store.spans(claim.rollout.rollout_id)

    @store_test
    async def test_spans_default_to_the_deciding_attempt(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS))
        shared = new_span_id()
        await store.finish([outcome_of(first, "failed", spans=[make_span(first, name="one", span_id=shared)])])
        second = await claim_one(store)
        await store.append_spans([make_span(second, name="two", span_id=shared)])
        assert ["two"] == [s.name for s in await store.spans(first.rollout.rollout_id)]
        await store.finish([outcome_of(second)])
        assert ["two"] == [s.name for s in await store.spans(first.rollout.rollout_id)]
        of_first = await store.spans(first.rollout.rollout_id, attempt_id=first.attempt.attempt_id)
        assert ["one"] == [s.name for s in of_first]

    @store_test
    async def test_late_reward_attaches_to_a_finished_rollout(self, store: Store) -> None:
        done = await finish_one(store, spans=1)
        assert done.attempt_id is not None
        reward = make_reward_span(done.rollout_id, done.attempt_id, 1.0)
        await store.append_spans([reward])
        last = (await store.spans(done.rollout_id))[-1]
        assert (reward.reward, True) == (last.reward, last.is_late)

    @store_test
    async def test_late_reward_that_is_not_finite_is_refused_by_name(self, store: Store) -> None:
        done = await finish_one(store, spans=1)
        assert done.attempt_id is not None
        before = await store.spans(done.rollout_id)
        for value in (float("nan"), float("inf")):
            with pytest.raises(StoreError, match=f"{done.rollout_id}.*'human'.*{value}"):
                await store.append_spans([make_reward_span(done.rollout_id, done.attempt_id, value)])
        assert before == await store.spans(done.rollout_id)

    @store_test
    async def test_reward_without_attempt_belongs_to_the_rollout(self, store: Store) -> None:
        rollout = (await store.enqueue([make_rollout()]))[0]
        await store.append_spans([make_reward_span(rollout.rollout_id, "", 1.0)])
        assert 1 == len(await store.spans(rollout.rollout_id, attempt_id=""))

    @store_test
    async def test_call_with_an_integer_beyond_64_bits_is_refused(self, store: Store) -> None:
        claim = await start_one(store)
        for number in (2**64, -(2**63) - 1):
            for part in (
                {"request": {"messages": [number]}},
                {"request": [number]},
                {"response": {"choices": [number]}},
            ):
                call = msgspec.structs.replace(make_call([1], [2]), **part)
                with pytest.raises(StoreError):
                    await store.append_spans([make_span(claim, call=call)])
        assert [] == await store.spans(claim.rollout.rollout_id)

    @store_test
    async def test_spans_of_unknown_rollouts_are_refused_by_name(self, store: Store) -> None:
        claim = await start_one(store)
        stray = msgspec.structs.replace(make_span(claim), rollout_id="ro-nobody", attempt_id="ro-nobody.1")
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.append_spans([stray])

    @store_test
    async def test_conversations_come_back_exactly_however_their_prompts_overlap(self, store: Store) -> None:
        claim = await start_one(store)
        asked = _conversations(claim, random.Random(7))
        for start in range(0, len(asked), 5):
            await store.append_spans(asked[start : start + 5])
        read = await store.spans(claim.rollout.rollout_id)
        assert [s.call for s in asked] == [s.call for s in read]
        tail = await store.spans(claim.rollout.rollout_id, after=len(asked) - 3)
        assert [s.call for s in asked[-3:]] == [s.call for s in tail]

    @store_test
    async def test_returned_spans_do_not_alias_stored_ones(self, store: Store) -> None:
        claim = await start_one(store)
        span = make_span(claim, call=make_call([1], [2]))
        await store.append_spans([span])
        span.attributes["text"] = "changed"
        (await store.spans(claim.rollout.rollout_id))[0].attributes["list"].append("c")
        read = (await store.spans(claim.rollout.rollout_id))[0]
        assert ("x", ["a", "b"]) == (read.attributes["text"], read.attributes["list"])


class FeedTests:
    """Tests of the ordered change feed."""

    @store_test
    async def test_feed_tells_a_rollouts_life_in_order(self, store: Store) -> None:
        assert (0, []) == (await store.cursor(), await store.changes())
        claim = await start_one(store, make_rollout(experiment="e"))
        await store.append_spans([make_span(claim)])
        await store.finish([outcome_of(claim)])
        feed = await store.changes()
        assert ["queued", "running", "succeeded"] == [c.status for c in feed if c.kind == "rollout"]
        assert [claim.attempt.attempt_id] == [c.attempt_id for c in feed if c.kind == "spans"]
        assert {(claim.rollout.rollout_id, "e")} == {(c.key, c.experiment) for c in feed}
        cursors = [c.cursor for c in feed]
        assert sorted(set(cursors)) == cursors
        assert cursors[-1] == await store.cursor()

    @store_test
    async def test_feed_pages_without_gap_or_repetition(self, store: Store) -> None:
        for _ in range(4):
            await finish_one(store, spans=1)
        everything = await store.changes()
        pages = list(await store.changes(limit=3))
        while page := await store.changes(after=pages[-1].cursor, limit=3):
            assert len(page) <= 3
            pages += page
        assert everything == pages

    @store_test
    async def test_waiting_for_changes_is_woken_by_each_kind_of_write(self, store: Store) -> None:
        wake_ups = WakeUps()
        for _ in range(3):
            claim = await start_one(store)
            writes = [
                lambda: store.enqueue([make_rollout()]),
                lambda: store.claim(worker="w"),
                lambda claim=claim: store.append_spans([make_span(claim)]),
                lambda claim=claim: store.finish([outcome_of(claim)]),
            ]
            for write in writes:
                assert await wake_ups.time(store.changes(after=await store.cursor(), wait_s=10), write)
        wake_ups.check()

    @store_test
    async def test_waiting_for_changes_ends_empty_after_its_time(self, store: Store) -> None:
        started = time.monotonic()
        assert [] == await store.changes(wait_s=0.2)
        assert 0.15 < time.monotonic() - started < 2


def _conversations(claim: Claim, draw: random.Random) -> list[Span]:
    """Create spans of interleaved model calls, whose prompts extend earlier prompts, branch off them, or do neither."""
    histories: list[list[int]] = [[draw.randrange(1000) for _ in range(40)] for _ in range(3)]
    spans: list[Span] = []
    for _ in range(40):
        prompt = list(draw.choice(histories))
        if draw.random() < 0.3:
            prompt = prompt[: draw.randrange(len(prompt) + 1)]
        prompt += [draw.randrange(1000) for _ in range(draw.randrange(20))]
        response = [draw.randrange(1000) for _ in range(draw.randrange(15))]
        histories.append(prompt + response)
        spans.append(make_span(claim, name="chat", call=make_call(prompt, response, request_id=str(len(spans)))))
    return spans
