"""Tests of selecting spans by name, agent and kind, within a rollout and across an experiment."""

# ruff: noqa: D102  # the names of the tests say what holds

import pytest

from agl import semconv
from agl.contracts import RolloutQuery, SpanQuery, Store
from agl.errors import NotFoundError, StoreError
from agl.schemas import Claim, Rollout, Span
from agl.stores import read_recordings
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


class SpanQueryTests:
    """Tests of recordings that hold only the spans that a query selects."""

    @store_test
    async def test_spans_are_chosen_by_name_kind_and_agent(self, store: Store) -> None:
        rollout = await _finish_team(store, experiment="e")
        queries = {
            ("search a", "search b"): SpanQuery(contains="search"),
            ("search b",): SpanQuery(name="search b"),
            ("chat", "chat"): SpanQuery(kind="call"),
            ("writer", "critic"): SpanQuery(kind="agent"),
            ("writer", "search a", "chat"): SpanQuery(agent="writer"),
            ("search a",): SpanQuery(agent="writer", kind="tool"),
            ("evaluate",): SpanQuery(kind="reward"),
            (): SpanQuery(name="search"),
        }
        for expected, query in queries.items():
            assert expected == tuple(span.name for span in await _spans(store, rollout, query))

    @store_test
    async def test_chosen_spans_come_whole_and_in_pages(self, store: Store) -> None:
        claim = await start_one(store)
        await store.append_spans([_numbered(claim, number) for number in range(150)])
        rollout = claim.rollout
        calls = [span for span in await store.spans(rollout.rollout_id) if span.call is not None]
        pages: list[Span] = []
        while page := await _spans(
            store, rollout, SpanQuery(kind="call", after=pages[-1].sequence if pages else 0, limit=20)
        ):
            assert len(page) <= 20
            pages += page
        assert calls == pages
        query = RolloutQuery(ids=(rollout.rollout_id,))
        (first,) = [each async for each in read_recordings(store, query, spans=SpanQuery(kind="call", limit=20))]
        assert (calls[:20], False) == (first.spans, first.is_whole)
        (whole,) = await store.recordings(query, spans=SpanQuery(kind="call", limit=51))
        assert (calls, True) == (whole.spans, whole.is_whole)
        with pytest.raises(StoreError, match="limit"):
            await _spans(store, rollout, SpanQuery(limit=1 << 63))

    @store_test
    async def test_spans_are_chosen_over_an_experiment_page_by_page(self, store: Store) -> None:
        done = [await _finish_team(store, experiment="e") for _ in range(5)]
        await _finish_team(store, experiment="other")
        query, chosen = RolloutQuery(experiment="e", limit=2), SpanQuery(kind="tool", contains=" b")
        first = await store.recordings(query, spans=chosen)
        assert done[:2] == [recording.rollout for recording in first]
        found = [recording async for recording in read_recordings(store, query, spans=chosen)]
        assert done == [recording.rollout for recording in found]
        assert [["search b"]] * 5 == [[span.name for span in recording.spans] for recording in found]

    @store_test
    async def test_spans_are_chosen_from_one_attempt(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS))
        await store.finish([outcome_of(first, "failed", spans=[make_span(first, name="one")])])
        second = await claim_one(store)
        (done,) = await store.finish([outcome_of(second, spans=[make_span(second, name="two")])])
        await store.append_spans([make_reward_span(done.rollout_id, "", 1.0)])
        ids = {"two": None, "one": first.attempt.attempt_id, "evaluate": ""}
        for expected, attempt_id in ids.items():
            found = await _spans(store, done, SpanQuery(attempt_id=attempt_id))
            assert [expected] == [span.name for span in found]
        with pytest.raises(NotFoundError, match=f"{done.rollout_id}.7"):
            await _spans(store, done, SpanQuery(attempt_id=f"{done.rollout_id}.7"))

    @store_test
    async def test_all_attempts_of_many_rollouts_come_in_one_call(self, store: Store) -> None:
        done = [await _finish_team(store, experiment="e", tries=tries) for tries in (1, 3, 2)]
        query = RolloutQuery(ids=tuple(rollout.rollout_id for rollout in done))
        found = {each.rollout.rollout_id: each.attempts for each in await store.recordings(query, spans="none")}
        assert {rollout.rollout_id: await store.attempts(rollout.rollout_id) for rollout in done} == found
        assert [1, 3, 2] == [len(attempts) for attempts in found.values()]


async def _spans(store: Store, rollout: Rollout, query: SpanQuery) -> list[Span]:
    (recording,) = await store.recordings(RolloutQuery(ids=(rollout.rollout_id,)), spans=query)
    assert rollout.rollout_id == recording.rollout.rollout_id
    return recording.spans


def _numbered(claim: Claim, number: int) -> Span:
    return make_span(claim, name=f"span {number}", call=None if number % 3 else make_call(range(number), [number]))


async def _finish_team(store: Store, *, experiment: str, tries: int = 1) -> Rollout:
    """Run a rollout with two agents, a writer and a critic, each with a search and a model call.

    Its last attempt succeeds; the attempts before it are lost.
    """
    await store.enqueue([make_rollout(experiment=experiment)])
    for _ in range(tries - 1):
        lost = await claim_one(store)
        await store.finish([outcome_of(lost, "lost")])
    claim = await claim_one(store)
    spans = [span for agent, at in (("writer", "a"), ("critic", "b")) for span in _turn(claim, agent, at)]
    spans.append(make_reward_span(claim.rollout.rollout_id, claim.attempt.attempt_id, 1.0))
    (done,) = await store.finish([outcome_of(claim, spans=spans)])
    return done


def _turn(claim: Claim, agent: str, at: str) -> list[Span]:
    own = make_span(claim, name=agent)
    made = {
        agent: {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: agent},
        f"search {at}": {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "search"},
        "chat": {semconv.OPERATION: semconv.OP_CHAT},
    }
    return [
        Span(
            rollout_id=own.rollout_id,
            attempt_id=own.attempt_id,
            span_id=own.span_id if name == agent else make_span(claim).span_id,
            parent_id=None if name == agent else own.span_id,
            name=name,
            attributes=attributes,
            call=make_call([1, 2], [3]) if name == "chat" else None,
        )
        for name, attributes in made.items()
    ]
