"""Tests of enqueueing, claiming, finishing, retrying, cancelling and listing rollouts."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
from typing import Any

import msgspec
import pytest

from agl.contracts import Metric, Presence, RolloutQuery, Store
from agl.errors import ConflictError, FencedError, InvalidQueryError, NotFoundError, StoreError
from agl.schemas import AttemptStatus, Outcome, RetryPolicy, Rollout
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import (
    TWO_ATTEMPTS,
    claim_one,
    finish_one,
    make_rollout,
    make_span,
    outcome_of,
    start_one,
)


class QueueTests:
    """Tests of a rollout's life from the queue to its final status."""

    @store_test
    async def test_enqueue_returns_rollouts_as_stored_in_order(self, store: Store) -> None:
        asked = [make_rollout() for _ in range(5)]
        stored = await store.enqueue(asked)
        assert [r.rollout_id for r in asked] == [r.rollout_id for r in stored]
        assert {("queued", 0, None)} == {(r.status, r.attempts, r.attempt_id) for r in stored}
        assert all(r.created_at > 0 for r in stored)
        assert stored == await store.rollouts(RolloutQuery())

    @store_test
    async def test_enqueue_keeps_every_field(self, store: Store) -> None:
        asked = Rollout(
            rollout_id="ro-all",
            task={"q": "ü", "answer": 42, "nothing": None, "nested": [[1.5], {"a": {}}]},
            experiment="sql",
            group_id="g",
            mode="val",
            resources={"main": "v3"},
            retry=RetryPolicy(max_attempts=3, max_losses=5, timeout_s=1.5, retry_on=("timeout",)),
            hidden=("answer",),
            metadata={"algorithm": "grpo", "step": 3},
        )
        stored = (await store.enqueue([asked]))[0]
        assert asked == msgspec.structs.replace(stored, created_at=0.0)

    @store_test
    async def test_values_of_a_wrong_type_are_refused(self, store: Store) -> None:
        claim = await start_one(store)
        wrong: Any = "text"
        about: dict[str, Any] = {"experiment": "e", "algorithm": "a", "name": "n", "value": 1.0}
        for write in (
            lambda: store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="failed", error=wrong)]),
            lambda: store.enqueue([make_rollout(group_id=wrong.encode())]),
            lambda: store.append_spans([make_span(claim, name=wrong.encode())]),
            lambda: store.log_metrics([Metric(step=2**63, **about)]),
            lambda: store.announce(Presence(experiment="e", session="s", details={"n": 2**70})),
        ):
            with pytest.raises(StoreError):
                await write()
        assert ["running"] == [each.status for each in await store.attempts(claim.rollout.rollout_id)]

    @store_test
    async def test_enqueue_again_is_harmless_and_returns_the_rollout_as_it_stands(self, store: Store) -> None:
        asked = make_rollout()
        await store.enqueue([asked, asked])
        await claim_one(store)
        again = await store.enqueue([asked])
        assert ["running"] == [r.status for r in again]
        assert 1 == len(await store.rollouts(RolloutQuery()))
        assert [] == await store.claim(worker="w")

    @store_test
    async def test_enqueue_of_known_id_with_other_content_is_refused(self, store: Store) -> None:
        asked = make_rollout()
        await store.enqueue([asked])
        with pytest.raises(ConflictError, match=asked.rollout_id):
            await store.enqueue([msgspec.structs.replace(asked, task="other")])
        assert asked.task == (await store.rollouts(RolloutQuery(ids=(asked.rollout_id,))))[0].task

    @store_test
    async def test_claim_opens_attempts_for_the_oldest(self, store: Store) -> None:
        asked = await store.enqueue([make_rollout() for _ in range(3)])
        claims = await store.claim(worker="w7", limit=2)
        assert [r.rollout_id for r in asked[:2]] == [c.rollout.rollout_id for c in claims]
        first = claims[0]
        assert ("running", 1, first.attempt.attempt_id) == (
            first.rollout.status,
            first.rollout.attempts,
            first.rollout.attempt_id,
        )
        assert (f"{asked[0].rollout_id}.1", 1, "w7", "running") == (
            first.attempt.attempt_id,
            first.attempt.number,
            first.attempt.worker,
            first.attempt.status,
        )
        assert first.rollout.started_at > 0
        assert first.attempt.lease_until > first.attempt.started_at > 0

    @store_test
    async def test_claim_of_nothing_returns_at_once(self, store: Store) -> None:
        async with asyncio.timeout(2):
            assert [] == await store.claim(worker="w", limit=4)

    @store_test
    async def test_claim_takes_only_its_experiment(self, store: Store) -> None:
        await store.enqueue([make_rollout(experiment="a"), make_rollout(experiment="b")])
        claims = await store.claim(worker="w", limit=9, experiment="b")
        assert ["b"] == [c.rollout.experiment for c in claims]
        assert [] == await store.claim(worker="w", limit=9, experiment="c")
        assert ["a"] == [c.rollout.experiment for c in await store.claim(worker="w", limit=9)]

    @store_test
    async def test_claim_with_the_same_claim_id_returns_the_same_attempts(self, store: Store) -> None:
        await store.enqueue([make_rollout() for _ in range(4)])
        first = await store.claim(worker="w", limit=2, claim_id="c1")
        again = await store.claim(worker="w", limit=2, claim_id="c1")
        assert [c.attempt.attempt_id for c in first] == [c.attempt.attempt_id for c in again]
        await store.finish([outcome_of(first[0])])
        rest = await store.claim(worker="w", limit=2, claim_id="c1")
        assert [first[1].attempt.attempt_id] == [c.attempt.attempt_id for c in rest]

    @store_test
    async def test_no_two_concurrent_claims_get_one_rollout(self, store: Store) -> None:
        asked = await store.enqueue([make_rollout() for _ in range(60)])
        batches = await asyncio.gather(*(store.claim(worker=f"w{i}", limit=1 + i % 4) for i in range(40)))
        taken = [c.rollout.rollout_id for batch in batches for c in batch]
        assert sorted(r.rollout_id for r in asked) == sorted(taken)

    @store_test
    async def test_finish_decides_rollout_and_attempt_and_keeps_the_error(self, store: Store) -> None:
        for status in ("succeeded", "failed", "timeout"):
            claim = await start_one(store)
            decided = (await store.finish([outcome_of(claim, status)]))[0]
            assert ("succeeded" if status == "succeeded" else "failed") == decided.status
            assert (claim.attempt.attempt_id, True) == (decided.attempt_id, decided.finished_at > 0)
            attempt = (await store.attempts(claim.rollout.rollout_id))[0]
            assert (status, outcome_of(claim, status).error) == (attempt.status, attempt.error)
            assert attempt.finished_at > 0

    @store_test
    async def test_finish_takes_many_outcomes_in_order(self, store: Store) -> None:
        await store.enqueue([make_rollout() for _ in range(5)])
        claims = await store.claim(worker="w", limit=5)
        decided = await store.finish([outcome_of(claim) for claim in claims])
        assert [c.rollout.rollout_id for c in claims] == [r.rollout_id for r in decided]

    @store_test
    async def test_finish_again_with_the_same_outcome_is_harmless(self, store: Store) -> None:
        claim = await start_one(store)
        outcome = outcome_of(claim, spans=[make_span(claim)])
        first = await store.finish([outcome])
        assert first == await store.finish([outcome])
        assert 1 == len(await store.spans(claim.rollout.rollout_id))

    @store_test
    async def test_finish_again_with_another_outcome_is_fenced(self, store: Store) -> None:
        claim = await start_one(store)
        await store.finish([outcome_of(claim)])
        with pytest.raises(FencedError, match=claim.attempt.attempt_id):
            await store.finish([outcome_of(claim, "failed")])
        assert "succeeded" == (await store.rollouts(RolloutQuery()))[0].status

    @store_test
    async def test_failed_attempt_is_retried_until_the_policy_is_exhausted(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS))
        queued = (await store.finish([outcome_of(first, "failed")]))[0]
        assert ("queued", 1, 1, 0.0) == (queued.status, queued.attempts, queued.failures, queued.finished_at)
        second = await claim_one(store)
        assert (2, f"{first.rollout.rollout_id}.2") == (second.attempt.number, second.attempt.attempt_id)
        assert "failed" == (await store.finish([outcome_of(second, "failed")]))[0].status
        assert ["failed", "failed"] == [a.status for a in await store.attempts(first.rollout.rollout_id)]

    @store_test
    async def test_attempts_that_are_given_back_or_lost_leave_all_tries_to_the_agent(self, store: Store) -> None:
        claim = await start_one(store, make_rollout(retry=TWO_ATTEMPTS))
        for given_back in (True, True, True, False, False):
            lost = Outcome(attempt_id=claim.attempt.attempt_id, status="lost")
            assert "queued" == (await store.finish([lost if given_back else outcome_of(claim, "lost")]))[0].status
            claim = await claim_one(store)
        assert "queued" == (await store.finish([outcome_of(claim, "failed")]))[0].status
        ended = (await store.finish([outcome_of(await claim_one(store), "failed")]))[0]
        assert ("failed", 7, 2, 2) == (ended.status, ended.attempts, ended.failures, ended.losses)
        assert ended == (await store.rollouts(RolloutQuery()))[0]

    @store_test
    async def test_rollout_has_as_many_attempts_as_workers_give_back(self, store: Store) -> None:
        claim = await start_one(store)
        neighbour = (await store.enqueue([make_rollout(experiment="other")]))[0]
        for _ in range(300):
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="lost")])
            claim = await claim_one(store)
        await store.append_spans([make_span(claim, name="late in life")])
        assert 301 == claim.attempt.number
        ended = (await store.finish([outcome_of(claim)]))[0]
        assert ["late in life"] == [span.name for span in await store.spans(ended.rollout_id)]
        assert list(range(1, 302)) == [attempt.number for attempt in await store.attempts(ended.rollout_id)]
        assert [] == await store.attempts(neighbour.rollout_id)
        assert 1 == await store.delete([ended.rollout_id])
        assert [neighbour] == await store.rollouts(RolloutQuery())

    @store_test
    async def test_outcome_that_the_policy_does_not_retry_is_final(self, store: Store) -> None:
        claim = await start_one(store, make_rollout(retry=RetryPolicy(max_attempts=5, retry_on=("timeout",))))
        assert "failed" == (await store.finish([outcome_of(claim, "failed")]))[0].status
        assert [] == await store.claim(worker="w")

    @store_test
    async def test_finish_of_an_older_attempt_does_not_touch_the_newer(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS))
        await store.finish([outcome_of(first, "failed")])
        second = await claim_one(store)
        with pytest.raises(FencedError, match=first.attempt.attempt_id):
            await store.finish([outcome_of(first, "succeeded")])
        await store.finish([outcome_of(second, "succeeded")])
        assert ["failed", "succeeded"] == [a.status for a in await store.attempts(first.rollout.rollout_id)]

    @store_test
    async def test_cancel_stops_queued_and_running_and_leaves_finished(self, store: Store) -> None:
        done = await finish_one(store)
        running = await start_one(store)
        queued = (await store.enqueue([make_rollout()]))[0]
        ids = [done.rollout_id, running.rollout.rollout_id, queued.rollout_id]
        assert ["succeeded", "cancelled", "cancelled"] == [r.status for r in await store.cancel(ids)]
        assert [] == await store.claim(worker="w")
        assert [] == await store.renew([running.attempt.attempt_id])
        assert "cancelled" == (await store.attempts(running.rollout.rollout_id))[0].status
        with pytest.raises(FencedError, match=running.attempt.attempt_id):
            await store.finish([outcome_of(running)])
        assert ["succeeded", "cancelled", "cancelled"] == [r.status for r in await store.cancel(ids)]

    @store_test
    async def test_unknown_ids_are_errors_that_name_them(self, store: Store) -> None:
        await store.enqueue([make_rollout()])
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.finish([Outcome(attempt_id="ro-nobody.1", status="succeeded")])
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.cancel(["ro-nobody"])
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.attempts("ro-nobody")
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.spans("ro-nobody")
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.rollouts(RolloutQuery(ids=("ro-nobody",)))

    @store_test
    async def test_rollouts_page_in_order_of_id(self, store: Store) -> None:
        asked = sorted(r.rollout_id for r in await store.enqueue([make_rollout() for _ in range(7)]))
        pages: list[str] = []
        while page := await store.rollouts(RolloutQuery(after=pages[-1] if pages else "", limit=3)):
            assert len(page) <= 3
            pages += [r.rollout_id for r in page]
        assert asked == pages
        newest = await store.rollouts(RolloutQuery(limit=2, is_newest_first=True))
        assert asked[:-3:-1] == [r.rollout_id for r in newest]
        older = await store.rollouts(RolloutQuery(after=asked[2], is_newest_first=True))
        assert asked[1::-1] == [r.rollout_id for r in older]

    @store_test
    async def test_page_behind_a_value_of_another_type_is_refused(self, store: Store) -> None:
        [known] = await store.enqueue([make_rollout()])
        queries = (RolloutQuery(sort="created_at"), RolloutQuery(sort="finished_at"), RolloutQuery(sort="status"))
        for query in queries:
            wrong = 0.0 if query.sort == "status" else ""
            with pytest.raises(InvalidQueryError, match=f"after_value = {wrong!r} is no {query.sort} of a rollout"):
                await store.rollouts(msgspec.structs.replace(query, after=known.rollout_id, after_value=wrong))
            assert [] == await store.rollouts(query.next(known))

    @store_test
    async def test_rollouts_filter_by_each_field(self, store: Store) -> None:
        a = make_rollout(experiment="a", group_id="g1", mode="val")
        b = make_rollout(experiment="b", group_id="g2")
        c = make_rollout(experiment="b", group_id="g1")
        await store.enqueue([a, b, c])
        await store.claim(worker="w", experiment="a")
        queries = {
            (a.rollout_id,): RolloutQuery(experiment="a"),
            (b.rollout_id, c.rollout_id): RolloutQuery(status=("queued", "failed")),
            (a.rollout_id, c.rollout_id): RolloutQuery(group_id="g1"),
            (b.rollout_id,): RolloutQuery(mode="train", group_id="g2"),
            (c.rollout_id,): RolloutQuery(ids=(a.rollout_id, c.rollout_id), experiment="b"),
        }
        for expected, query in queries.items():
            assert expected == tuple(r.rollout_id for r in await store.rollouts(query))

    @store_test
    async def test_rollouts_are_counted_on_all_pages(self, store: Store) -> None:
        asked = [make_rollout(experiment=name, group_id=group) for name in "ab" for group in ("g1", "g2", "")]
        await store.enqueue(asked)
        await store.claim(worker="w", experiment="a")
        ids = tuple(rollout.rollout_id for rollout in asked)
        for count, query in (
            (6, RolloutQuery(limit=2)),
            (6, RolloutQuery(is_newest_first=True, limit=1, after=ids[3])),
            (3, RolloutQuery(experiment="a", limit=1, after=ids[0])),
            (2, RolloutQuery(group_id="g2")),
            (2, RolloutQuery(group_id="", limit=1)),
            (1, RolloutQuery(status=("running",), mode="train")),
            (5, RolloutQuery(status=("queued", "succeeded"))),
            (1, RolloutQuery(ids=ids[2:5], experiment="a", limit=1)),
            (0, RolloutQuery(mode="val")),
        ):
            assert count == await store.count_rollouts(query)
        with pytest.raises(NotFoundError, match="ro-nobody"):
            await store.count_rollouts(RolloutQuery(ids=("ro-nobody",)))

    @store_test
    async def test_what_is_given_and_returned_never_aliases_what_is_stored(self, store: Store) -> None:
        task: dict[str, Any] = {"list": [1], "q": {"deep": 1}}
        asked = msgspec.structs.replace(make_rollout(), task=task, metadata={"tags": ["x"]})
        returned = (await store.enqueue([asked]))[0]
        task["list"] = [2]
        task["q"]["deep"] = 2
        returned.task["list"].append(3)
        returned.metadata["tags"].append("y")
        claim = await claim_one(store)
        claim.rollout.task["list"].append(4)
        read = (await store.rollouts(RolloutQuery()))[0]
        assert ({"list": [1], "q": {"deep": 1}}, {"tags": ["x"]}) == (read.task, read.metadata)

    @store_test
    async def test_every_terminal_attempt_status_is_accepted(self, store: Store) -> None:
        expected: dict[AttemptStatus, str] = {"succeeded": "succeeded", "failed": "failed", "timeout": "failed"}
        for status, rollout_status in expected.items():
            assert rollout_status == (await finish_one(store, status=status)).status
