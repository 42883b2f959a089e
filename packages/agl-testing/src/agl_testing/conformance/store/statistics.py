"""Tests that a store's statistics equal the sums over its rollouts."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, variance

import pytest
from msgspec.structs import replace

from agl import semconv
from agl.contracts import RolloutQuery, Statistics, Store
from agl.episodes import episode_reward
from agl.errors import FencedError
from agl.schemas import Claim, Json, Mode, Reward, RewardSource, Rollout, Span, new_span_id
from agl.stores import all_spans, read_recordings
from agl_testing.conformance._base import run
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.process import StoreLocation
from agl_testing.stores.samples import TWO_ATTEMPTS, make_call, make_rollout, make_span, outcome_of, start_one

MODES: tuple[Mode, ...] = ("train", "val")
LARGE = 1e12
"""A mean reward so large that a plain sum of squares would lose the variance to rounding."""


class StatisticsTests:
    """Tests of :meth:`agl.contracts.Store.statistics`."""

    @store_test
    async def test_statistics_count_finished_rollouts_by_step_and_mode(self, store: Store) -> None:
        assert [] == await store.statistics()
        first, second = await start_one(store, _rollout(step=1)), await start_one(store, _rollout(step=2))
        await start_one(store, _rollout(step=1))
        unstarted = make_rollout(experiment="e", mode="val")
        await store.enqueue([unstarted])
        call = make_span(first, call=make_call(range(7), range(3)))
        await store.append_spans([call, _graded(first, 0.25, source="agent")])
        await store.append_spans([call])
        await store.finish([outcome_of(first, spans=[_graded(first, 0.5)]), outcome_of(second, "failed")])
        await store.cancel([unstarted.rollout_id])
        unnamed, of_one, of_two = await store.statistics("e")
        assert (None, "val", 1, 0) == (unnamed.step, unnamed.mode, unnamed.cancelled, unnamed.reward.count)
        assert ("grpo", 1, 1, 1, 7, 3) == (
            of_one.algorithm,
            of_one.step,
            of_one.succeeded,
            of_one.calls,
            of_one.prompt_tokens,
            of_one.response_tokens,
        )
        assert (1, 0.5, 0.0) == (of_one.reward.count, of_one.reward.mean, of_one.reward.squares)
        assert (2, 1, 0) == (of_two.step, of_two.failed, of_two.calls)
        assert [] == await store.statistics("other")
        await _check(store)

    @store_test
    async def test_late_rewards_and_removals_change_the_statistics(self, store: Store) -> None:
        claims = [await start_one(store, _rollout(step=1)) for _ in range(3)]
        await store.finish([outcome_of(claim, spans=[_graded(claim, 1.0)]) for claim in claims])
        await store.append_spans([_graded(claims[0], 0.0, source="evaluator"), _graded(claims[1], 9.0, source="agent")])
        await store.append_spans([make_span(claims[1], call=make_call(range(5), range(5)))])  # late, so not counted
        (found,) = await store.statistics()
        assert (3, pytest.approx(2 / 3), 0) == (found.reward.count, found.reward.mean, found.calls)
        await store.delete([claims[0].rollout.rollout_id])
        (found,) = await store.statistics()
        assert (2, pytest.approx(1.0), pytest.approx(0.0, abs=1e-12)) == (
            found.reward.count,
            found.reward.mean,
            found.reward.squares,
        )
        await store.delete([claim.rollout.rollout_id for claim in claims[1:]])
        assert [] == await store.statistics()

    @store_test
    async def test_a_fenced_or_repeated_finish_counts_once(self, store: Store) -> None:
        claim = await start_one(store, replace(_rollout(step=1), retry=TWO_ATTEMPTS))
        await store.finish([outcome_of(claim, "failed", spans=[_graded(claim, 5.0)])])
        assert [] == await store.statistics()  # the rollout is queued again
        (again,) = await store.claim(worker="w")
        outcome = outcome_of(again, spans=[_graded(again, 1.0)])
        for _ in range(3):
            await store.finish([outcome])
        with pytest.raises(FencedError):
            await store.finish([outcome_of(again, "failed")])
        (found,) = await store.statistics()
        assert (1, 0, 1.0) == (found.succeeded, found.failed, found.reward.mean)
        await _check(store)

    @store_test
    async def test_the_spread_of_rewards_far_from_zero_is_exact(self, store: Store) -> None:
        claims = [await start_one(store, _rollout(step=1)) for _ in range(8)]
        values = [LARGE + at for at in range(8)]
        for claim, value in zip(claims, values, strict=True):
            await store.finish([outcome_of(claim, spans=[_graded(claim, value)])])
        (found,) = await store.statistics()
        assert (fmean(values), pytest.approx(variance(values), rel=1e-6)) == (found.reward.mean, found.reward.variance)
        huge = await start_one(store, _rollout(step=1))
        await store.finish([outcome_of(huge, spans=[_graded(huge, 1e300)])])
        (found,) = await store.statistics()
        assert (9, 8) == (found.succeeded, found.reward.count)

    @store_test
    async def test_counts_that_no_call_has_are_left_out(self, store: Store) -> None:
        claim = await start_one(store, _rollout(step=1))
        reported: list[Json] = [7, 1 << 62, 1 << 62, -5, True, 1.5, "9"]
        for count in reported:
            span = make_span(claim, call=replace(make_call(range(0), range(0)), request_id=new_span_id()))
            await store.append_spans([replace(span, attributes={semconv.INPUT_TOKENS: count})])
        await store.finish([outcome_of(claim)])
        (found,) = await store.statistics()
        assert (1, 7, 7) == (found.succeeded, found.calls, found.prompt_tokens)

    def test_statistics_equal_those_of_the_rollouts_after_any_sequence_by_two_writers(
        self, locate: Callable[[str], StoreLocation]
    ) -> None:
        async def body(location: StoreLocation, seed: int, offset: float) -> None:
            store = location.open()
            other = location.open() if getattr(self, "is_shared", True) else store
            try:
                writers = [(store, random.Random(f"{seed} first")), (other, random.Random(f"{seed} second"))]
                await asyncio.gather(*(_play(writer, chance, offset) for writer, chance in writers))
                await _check(store)
                assert await store.statistics() == await other.statistics()
            finally:
                await store.close()
                await other.close()

        for seed, offset in ((1, 0.0), (2, 0.0), (3, LARGE)):
            run(body(locate(f"store-{seed}"), seed, offset))


async def _play(store: Store, chance: random.Random, offset: float) -> None:
    """Finish, cancel and delete rollouts, lose attempts, and add late spans, at random."""
    finished: list[Claim] = []
    for _ in range(25):
        rollout = replace(_rollout(step=chance.randrange(2), mode=chance.choice(MODES)), retry=TWO_ATTEMPTS)
        await store.enqueue([rollout])
        for claim in await store.claim(worker="w", limit=2):
            if chance.random() < 0.5:
                await store.append_spans([_work(claim, chance, offset)])
            if chance.random() < 0.1:
                await store.cancel([claim.rollout.rollout_id])
                continue
            status = chance.choice(("succeeded", "succeeded", "failed", "lost"))
            spans = [_work(claim, chance, offset) for _ in range(chance.randrange(3))]
            (after,) = await store.finish([outcome_of(claim, status, spans=spans)])
            finished += [claim] if after.is_finished else []
        if finished and chance.random() < 0.4:
            claim = chance.choice(finished)
            await store.append_spans([_work(claim, chance, offset) for _ in range(2)])
        if finished and chance.random() < 0.2:
            await store.delete([finished.pop(chance.randrange(len(finished))).rollout.rollout_id])


def _work(claim: Claim, chance: random.Random, offset: float) -> Span:
    """Create the span of a model call, or of a reward from a random source."""
    if chance.random() < 0.4:
        return make_span(claim, call=make_call(range(chance.randrange(9)), range(chance.randrange(9))))
    source: RewardSource = chance.choice(("evaluator", "environment", "agent", "human"))
    value = chance.choice((None, offset - 3.5, offset + 0.1, offset + 7))
    span = _graded(claim, value, source=source, name=chance.choice(("", "a")))
    return replace(span, start_ns=chance.randrange(1, 5))


def _rollout(*, step: int, mode: Mode = "train") -> Rollout:
    return replace(make_rollout(experiment="e", mode=mode), metadata={"algorithm": "grpo", "step": step})


def _graded(claim: Claim, value: float | None, *, source: RewardSource = "environment", name: str = "") -> Span:
    return Span(
        rollout_id=claim.rollout.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        span_id=new_span_id(),
        name="evaluate",
        reward=Reward(value=value, name=name, source=source),
    )


async def _check(store: Store) -> None:
    """Assert that the statistics equal sums over all finished rollouts."""
    expected: dict[object, list[tuple[Rollout, list[Span], float | None]]] = {}
    statuses = ("succeeded", "failed", "cancelled")
    async for recording in read_recordings(store, RolloutQuery(status=statuses), spans="none"):
        rollout = recording.rollout
        spans = await all_spans(store, rollout.rollout_id) if rollout.attempt_id else []
        counted = [span for span in spans if span.reward is None or span.reward.source != "agent"]
        place = rollout.experiment, rollout.metadata.get("algorithm", ""), rollout.metadata.get("step"), rollout.mode
        expected.setdefault(place, []).append((rollout, spans, _reward(counted)))
    found: dict[object, Statistics] = {
        (each.experiment, each.algorithm, each.step, each.mode): each for each in await store.statistics()
    }
    assert expected.keys() == found.keys()
    for place, rollouts in expected.items():
        _check_one(found[place], rollouts)


def _check_one(found: Statistics, rollouts: Sequence[tuple[Rollout, list[Span], float | None]]) -> None:
    for status in ("succeeded", "failed", "cancelled"):
        assert sum(rollout.status == status for rollout, _, _ in rollouts) == getattr(found, status)
    calls = [span.call for _, spans, _ in rollouts for span in spans if span.call is not None and not span.is_late]
    assert (len(calls), sum(call.prompt_len for call in calls), sum(call.response_len for call in calls)) == (
        found.calls,
        found.prompt_tokens,
        found.response_tokens,
    )
    rewards = [reward for _, _, reward in rollouts if reward is not None]
    assert len(rewards) == found.reward.count
    seconds = math.fsum(rollout.finished_at - rollout.started_at for rollout, _, _ in rollouts if rollout.started_at)
    assert pytest.approx(seconds, abs=1e-3) == found.seconds
    if rewards:
        error = 1e-14 * max(1.0, *map(abs, rewards)) * len(rewards)
        assert pytest.approx(fmean(rewards), abs=error) == found.reward.mean
        squares = math.fsum((reward - fmean(rewards)) ** 2 for reward in rewards)
        assert pytest.approx(squares, abs=20 * error) == found.reward.squares


def _reward(spans: Sequence[Span]) -> float | None:
    """Compute the rollout's reward by the rule that episodes use."""
    graded = [span for span in spans if span.reward is not None]
    is_timed = all(span.start_ns > 0 for span in graded)
    return episode_reward(sorted(graded, key=lambda span: (span.start_ns if is_timed else 0, span.sequence)))
