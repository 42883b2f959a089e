"""Tests that no operation takes longer in a larger store, in order to find operations that scan all contents."""

# ruff: noqa: D102  # the names of the tests say what holds

import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from itertools import count

from agl.contracts import ExperimentRecord, LabelMove, Metric, RolloutQuery, Store, Trained, VersionScore
from agl.schemas import PromptTemplate, ResourceVersion
from agl_testing.conformance._base import run
from agl_testing.conformance.store.case import opened
from agl_testing.stores.process import StoreLocation
from agl_testing.stores.samples import make_rollout, make_span, outcome_of

ROLLOUTS = 20_000
"""Number of claimed rollouts in the large store, each with an attempt and a span; it has fewer of other records."""

ROUNDS = 15
"""Number of measurements per store; their medians are compared.

Measurements alternate between the stores, so that a busy machine slows both alike.
"""

TRIES = 3
"""Largest number of comparisons; the test fails only if all find a slow operation, since a busy machine misleads some.
"""

MOST = 4.0
"""Allowed ratio of the time in the large store to that in the small one: a larger store has deeper trees."""

SLACK_S = 0.0003
"""Seconds that an operation may take in addition to ``MOST``, for the noise of clocks and caches."""

_numbers = count(1)

Times = dict[str, list[float]]


class CostTests:
    """Compares the times of all operations in a small and in a large store."""

    def test_no_operation_costs_more_in_a_large_store(self, locate: Callable[[str], StoreLocation]) -> None:
        places = locate("small"), locate("large")

        async def body() -> None:
            async with opened(places[0]) as small, opened(places[1]) as large:
                await _fill(large)
                await _prepare(small)
                await _prepare(large)
                slow: dict[str, str] = {}
                for _ in range(TRIES):
                    slow = _compare(await _measure(small, large))
                    if not slow:
                        break
                if slow:
                    raise AssertionError(f"operations that cost more in a large store: {slow}")

        run(body(), limit_s=600)


def _compare(times: tuple[Times, Times]) -> dict[str, str]:
    """Return the operations that take longer in the large store, each with both times as text."""
    small, large = ({name: statistics.median(taken) for name, taken in part.items()} for part in times)
    return {
        name: f"{small[name] * 1e3:.2f} ms in a small store, {large[name] * 1e3:.2f} ms in a large one"
        for name in small
        if large[name] > MOST * small[name] + SLACK_S
    }


async def _measure(small: Store, large: Store) -> tuple[Times, Times]:
    times: tuple[Times, Times] = (defaultdict(list), defaultdict(list))
    for _ in range(ROUNDS):
        for store, into in zip((small, large), times, strict=True):
            await _round(store, into)
    return times


async def _round(store: Store, times: Times) -> None:
    """Time every operation once; the results have the same size in both stores."""

    async def timed(name: str, work: Awaitable[object]) -> None:
        begin = time.perf_counter()
        await work
        times[name].append(time.perf_counter() - begin)

    rollout = make_rollout(experiment="mine", group_id="mine")
    await timed("enqueue", store.enqueue([rollout]))
    await timed("list queued", store.rollouts(RolloutQuery(experiment="mine", status=("queued",))))
    await timed("list a group", store.rollouts(RolloutQuery(group_id="mine", limit=2)))
    await timed("list the newest", store.rollouts(RolloutQuery(is_newest_first=True, limit=2)))
    await timed("list by creation", store.rollouts(RolloutQuery(experiment="mine", sort="created_at", limit=2)))
    await timed("list by status", store.rollouts(RolloutQuery(experiment="mine", sort="status", limit=2)))
    await timed("count rollouts", store.count_rollouts(RolloutQuery(experiment="mine")))
    begin = time.perf_counter()
    (claim,) = await store.claim(worker="w", experiment="mine")
    times["claim"].append(time.perf_counter() - begin)
    await timed("list running", store.rollouts(RolloutQuery(status=("running",))))
    await timed("renew", store.renew([claim.attempt.attempt_id]))
    await timed("append spans", store.append_spans([make_span(claim)]))
    await timed("read spans", store.spans(rollout.rollout_id))
    await timed("finish", store.finish([outcome_of(claim, spans=[make_span(claim)])]))
    await timed("read changes", store.changes(after=await store.cursor() - 2))
    await timed("read the cursor", store.cursor())
    await timed("read attempts", store.attempts(rollout.rollout_id))
    await timed("read recordings", store.recordings(RolloutQuery(ids=(rollout.rollout_id,))))
    await timed("read a page", store.recordings(RolloutQuery(experiment="mine", limit=2)))
    await timed("claim nothing", store.claim(worker="w", experiment="nobody"))
    number = next(_numbers)
    await timed("save states", store.save_state({"mine/state": b"1"}, trained=[_ledger("mine", number)]))
    await timed("load states", store.load_state("mine/"))
    await timed("read the ledger", store.trained("mine", run=1, algorithm="a", rollout_ids=[f"mine-{number}"]))
    await timed("read an experiment", store.experiments("mine"))
    await timed("move a label", store.move_label(LabelMove(name="mine", label="x", version=f"v{number % 2}")))
    await timed("read labels", store.labels("mine"))
    await timed("save scores", store.save_scores([_score("mine", "v1")]))
    await timed("read scores", store.scores("mine"))
    await timed("read the newest version", store.resource("mine"))
    await timed("read versions", store.resources("mine"))
    await timed("log metrics", store.log_metrics([_metric("mine", 1)]))
    await timed("read metrics", store.metrics("mine"))
    await timed("delete", store.delete([rollout.rollout_id]))


async def _fill(store: Store) -> None:
    for _ in range(0, ROLLOUTS, 500):
        await store.enqueue([make_rollout(experiment="other", group_id="other") for _ in range(500)])
        claims = await store.claim(worker="w", limit=500)
        await store.append_spans([make_span(claim) for claim in claims])
        await store.finish([outcome_of(claim) for claim in claims[:250]])
        await store.cancel([claim.rollout.rollout_id for claim in claims[250:]])
    await store.enqueue([make_rollout(experiment="waiting") for _ in range(ROLLOUTS // 4)])
    for part in range(10):
        names = [f"other-{part}-{at}" for at in range(ROLLOUTS // 40)]
        ledger = [_ledger(name, 1) for name in names]
        await store.save_state(dict.fromkeys(names, b"1"), experiment=ExperimentRecord(name=names[0]), trained=ledger)
        await store.publish([_version(name, "v1") for name in names])
        await store.save_scores([_score(name, "v1") for name in names])
        await store.log_metrics([_metric(name, 1) for name in names])
        for name in names[:20]:
            await store.move_label(LabelMove(name=name, label="x", version="v1"))


async def _prepare(store: Store) -> None:
    """Write the records that both stores need for :func:`_round`."""
    await store.publish([_version("mine", "v0"), _version("mine", "v1")])
    await store.save_state({"mine/other": b"1"}, experiment=ExperimentRecord(name="mine"))
    await store.enqueue([make_rollout(experiment="idle") for _ in range(3)])
    for _ in range(3):
        await _round(store, defaultdict(list))


def _version(name: str, version: str) -> ResourceVersion:
    return ResourceVersion(name=name, version=version, resource=PromptTemplate(template=version))


def _score(name: str, version: str) -> VersionScore:
    return VersionScore(name=name, version=version, mean=0.5, low=0.0, high=1.0, n=2, how="fresh")


def _metric(experiment: str, step: int) -> Metric:
    return Metric(experiment=experiment, algorithm="a", step=step, name="loss", value=0.5)


def _ledger(name: str, number: int) -> Trained:
    return Trained(experiment=name, run=1, algorithm="a", step=number, rollout_ids=(f"{name}-{number}",))
