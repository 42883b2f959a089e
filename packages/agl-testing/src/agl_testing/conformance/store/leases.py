"""Tests of leases, time limits, fencing and waiting, with slow, lost and concurrent workers."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from agl.contracts import RolloutQuery, Store
from agl.errors import FencedError, StoreError
from agl.schemas import Claim, Outcome, RetryPolicy
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import TWO_ATTEMPTS, claim_one, make_rollout, make_span, outcome_of, start_one, until

T = TypeVar("T")

SHORT_S = 0.3
"""Seconds of a lease or time limit that lapses during the test."""

WAKE_UP_S = 0.05
"""Largest median delay in seconds between a write and the return of a call that waits for it; polling is slower."""


class WakeUps:
    """Measures the delay between a write and the return of the call that waits for it.

    The limit grows with the time of the writes themselves, which are slow on a busy machine.
    """

    def __init__(self) -> None:
        self._writes: list[float] = []
        self._delays: list[float] = []

    async def time(self, waiting: Coroutine[Any, Any, T], write: Callable[[], Awaitable[object]]) -> T:
        """Start the call ``waiting``, then ``write``; record the delay, and return the call's result."""
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0.02)
        sent = time.monotonic()
        await write()
        written = time.monotonic()
        found = await task
        self._writes.append(written - sent)
        self._delays.append(time.monotonic() - sent)
        return found

    def check(self) -> None:
        """Raise AssertionError if the median delay is above the limit."""
        assert statistics.median(self._delays) < max(WAKE_UP_S, 5 * statistics.median(self._writes)), self._delays


class LeaseTests:
    """Tests that leases detect lost workers, and that fencing refuses the late writes of those workers."""

    @store_test
    async def test_lapsed_lease_gives_the_rollout_to_a_waiting_worker(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS), lease_s=SHORT_S)
        second = await claim_one(store, wait_s=10)
        assert (first.rollout.rollout_id, 2) == (second.rollout.rollout_id, second.attempt.number)
        assert ["lost", "running"] == [a.status for a in await store.attempts(first.rollout.rollout_id)]

    @store_test
    async def test_lapsed_lease_is_noticed_while_somebody_waits_for_changes(self, store: Store) -> None:
        claim = await start_one(store, lease_s=SHORT_S)
        started, cursor = time.monotonic(), await store.cursor()
        seen = await store.changes(after=cursor, wait_s=10)
        assert [(claim.rollout.rollout_id, "queued")] == [(c.key, c.status) for c in seen]
        assert time.monotonic() - started < 5
        assert ["lost"] == [a.status for a in await store.attempts(claim.rollout.rollout_id)]

    @store_test
    async def test_lapsed_lease_is_seen_by_whoever_reads(self, store: Store) -> None:
        claim = await start_one(store, lease_s=SHORT_S)
        await asyncio.sleep(SHORT_S * 2)
        found = (await store.rollouts(RolloutQuery(ids=(claim.rollout.rollout_id,))))[0]
        assert ("queued", 0, 1) == (found.status, found.failures, found.losses)

    @store_test
    async def test_rollout_that_loses_every_worker_ends_at_its_limit(self, store: Store) -> None:
        await store.enqueue([make_rollout(retry=RetryPolicy(max_losses=1))])
        for _ in range(2):
            await claim_one(store, lease_s=0.01, wait_s=10)
            await asyncio.sleep(0.05)
        found = (await store.rollouts(RolloutQuery()))[0]
        assert ("failed", 2) == (found.status, found.losses)
        errors = [attempt.error for attempt in await store.attempts(found.rollout_id)]
        assert ["agl.LeaseLapsed", "agl.Quarantined"] == [error.type for error in errors if error]

    @store_test
    async def test_renewed_lease_holds_and_a_lapsed_one_does_not(self, store: Store) -> None:
        await store.enqueue([make_rollout(), make_rollout()])
        kept = await claim_one(store, lease_s=SHORT_S)
        lapsed = await claim_one(store, lease_s=SHORT_S)
        assert [kept.attempt.attempt_id] == await store.renew([kept.attempt.attempt_id], lease_s=60)
        await asyncio.sleep(SHORT_S * 2)
        both = [kept.attempt.attempt_id, lapsed.attempt.attempt_id]
        assert [kept.attempt.attempt_id] == await store.renew(both, lease_s=60)
        assert "succeeded" == (await store.finish([outcome_of(kept)]))[0].status

    @store_test
    async def test_late_finish_of_a_lost_attempt_is_fenced(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS), lease_s=SHORT_S)
        second = await claim_one(store, wait_s=10)
        with pytest.raises(FencedError, match=first.attempt.attempt_id):
            await store.finish([outcome_of(first)])
        assert "running" == (await store.rollouts(RolloutQuery()))[0].status
        decided = (await store.finish([outcome_of(second)]))[0]
        assert ("succeeded", second.attempt.attempt_id) == (decided.status, decided.attempt_id)

    @store_test
    async def test_late_spans_are_kept_and_marked(self, store: Store) -> None:
        first = await start_one(store, make_rollout(retry=TWO_ATTEMPTS), lease_s=SHORT_S)
        early = make_span(first, name="early")
        await store.append_spans([early])
        second = await claim_one(store, wait_s=10)
        late = make_span(first, name="late")
        await store.append_spans([late, make_span(second, name="current"), early])
        old = await store.spans(first.rollout.rollout_id, attempt_id=first.attempt.attempt_id)
        assert [("early", False), ("late", True)] == [(s.name, s.is_late) for s in old]
        assert [("current", False)] == [(s.name, s.is_late) for s in await store.spans(first.rollout.rollout_id)]
        assert "running" == (await store.rollouts(RolloutQuery()))[0].status

    @store_test
    async def test_attempt_beyond_its_time_limit_is_a_timeout_although_it_renews(self, store: Store) -> None:
        claim = await start_one(store, make_rollout(retry=RetryPolicy(timeout_s=SHORT_S)))
        await store.renew([claim.attempt.attempt_id], lease_s=60)

        async def is_finished() -> bool:
            return (await store.rollouts(RolloutQuery()))[0].is_finished

        await until(is_finished, store=store, limit_s=15)
        assert ["timeout"] == [a.status for a in await store.attempts(claim.rollout.rollout_id)]
        assert "failed" == (await store.rollouts(RolloutQuery()))[0].status

    @store_test
    async def test_waiting_claim_is_woken_by_an_enqueue(self, store: Store) -> None:
        wake_ups = WakeUps()
        for _ in range(7):
            claims = await wake_ups.time(store.claim(worker="w", wait_s=10), lambda: store.enqueue([make_rollout()]))
            assert 1 == len(claims)
        wake_ups.check()

    @store_test
    async def test_waiting_claim_of_another_experiment_keeps_waiting(self, store: Store) -> None:
        waiting = asyncio.create_task(store.claim(worker="w", wait_s=10, experiment="a"))
        await asyncio.sleep(0.02)
        await store.enqueue([make_rollout(experiment="b")])
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        await store.enqueue([make_rollout(experiment="a")])
        assert ["a"] == [c.rollout.experiment for c in await waiting]

    @store_test
    async def test_waiting_claim_ends_empty_after_its_time(self, store: Store) -> None:
        started = time.monotonic()
        assert [] == await store.claim(worker="w", wait_s=0.2)
        assert 0.15 < time.monotonic() - started < 2

    @store_test
    async def test_each_of_many_waiting_claims_gets_its_rollout(self, store: Store) -> None:
        waiting = [asyncio.create_task(store.claim(worker=f"w{i}", wait_s=10)) for i in range(10)]
        await asyncio.sleep(0.02)
        asked = await store.enqueue([make_rollout() for _ in range(10)])
        taken = [c.rollout.rollout_id for claims in await asyncio.gather(*waiting) for c in claims]
        assert sorted(r.rollout_id for r in asked) == sorted(taken)

    @store_test
    async def test_cancelled_waiting_claim_loses_no_rollout(self, store: Store) -> None:
        for round_number in range(20):
            waiting = asyncio.create_task(store.claim(worker="gone", wait_s=10))
            await asyncio.sleep(0.001 * (round_number % 3))
            await store.enqueue([make_rollout()])
            await asyncio.sleep(0)
            waiting.cancel()
            result = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(result, BaseException):
                assert isinstance(result, asyncio.CancelledError)
                assert 1 == len(await store.claim(worker="next", wait_s=5))

    @store_test
    async def test_claims_cancelled_at_any_moment_lose_no_rollout(self, store: Store) -> None:
        draw = random.Random(7)
        asked = {rollout.rollout_id for rollout in await store.enqueue([make_rollout() for _ in range(60)])}
        taken: list[Claim] = []

        async def take(*, wait_s: float) -> None:
            taken.extend(await store.claim(worker="w", limit=3, lease_s=600, wait_s=wait_s))

        for _ in range(20):
            claiming = [asyncio.create_task(take(wait_s=0.1)) for _ in range(4)]
            await asyncio.sleep(draw.uniform(0, 0.01))
            for task in claiming:
                if draw.random() < 0.7:
                    task.cancel()
            await asyncio.gather(*claiming, return_exceptions=True)
        while len(taken) < len(asked):
            await take(wait_s=1)
        assert sorted(asked) == sorted(claim.rollout.rollout_id for claim in taken)

    @store_test
    async def test_repeated_claim_id_returns_what_a_cancelled_claim_took(self, store: Store) -> None:
        draw = random.Random(11)
        await store.enqueue([make_rollout() for _ in range(3)])
        for number in range(20):
            claiming = asyncio.create_task(store.claim(worker="w", limit=3, lease_s=600, claim_id=f"c{number}"))
            await asyncio.sleep(draw.uniform(0, 0.005))
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)
            taken = await store.claim(worker="w", claim_id=f"c{number}")
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="lost") for claim in taken])
            assert ["queued"] * 3 == [rollout.status for rollout in await store.rollouts(RolloutQuery())]

    @store_test
    async def test_close_ends_waiting_calls(self, store: Store) -> None:
        claiming = asyncio.create_task(store.claim(worker="w", wait_s=20))
        watching = asyncio.create_task(store.changes(after=0, wait_s=20))
        await asyncio.sleep(0.05)
        await store.close()
        with pytest.raises(StoreError):
            await claiming
        with pytest.raises(StoreError):
            await watching
        await store.close()

    @store_test
    async def test_one_object_serves_several_threads_and_event_loops(self, store: Store) -> None:
        taken: list[str] = []

        async def work() -> None:
            while claims := await store.claim(worker="thread", wait_s=1.0):
                await store.append_spans([make_span(claims[0])])
                await store.finish([outcome_of(claims[0])])
                taken.append(claims[0].rollout.rollout_id)

        threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(3)]
        for thread in threads:
            thread.start()
        asked: list[str] = []
        for _ in range(10):
            asked += [r.rollout_id for r in await store.enqueue([make_rollout() for _ in range(3)])]
            await asyncio.sleep(0.01)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert sorted(asked) == sorted(taken)
        assert {"succeeded"} == {r.status for r in await store.rollouts(RolloutQuery())}
