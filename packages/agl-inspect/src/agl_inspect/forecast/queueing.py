"""Simulates the steps of an algorithm with recorded rollouts, to forecast a step's tokens and the time of its queue.

A step runs several rollouts of each of its tasks, in the order of the queue and as many at once as the runner allows. A
simulated step draws one recorded step, and from it tasks and their rollouts with replacement. It does not mix recorded
steps, because the rollouts of a step share a server and its load, and so are slow or fast together.

At the end of a step few rollouts run at once. If all rollouts share one processor, the last ones speed up, and the step
takes little longer than its work at full load. If the rollouts wait for something else, the last ones do not speed up,
and the free slots stay idle. The recorded steps show which of the two applies (:func:`idle_share`).
"""

import random
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import sqrt
from statistics import fmean, variance

from agl.schemas import Record
from agl_inspect.forecast.observed import Observed, covered
from agl_inspect.statistics import student_quantile

_COUNTED = ("rows", "row_tokens", "trained_tokens", "prompt_tokens", "response_tokens")

_ROLLOUTS = 200_000
"""The most rollouts in all simulated steps together."""

_STEPS = 200

_ORDERS = 20
"""In how many random orders a recorded step's rollouts are queued again to estimate the step's time."""


class Spread(Record, frozen=True, kw_only=True):
    """The distribution of a number: mean, quantiles and the largest value."""

    mean: float = 0.0
    p10: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    most: float = 0.0


class StepForecast(Record, frozen=True, kw_only=True):
    """The forecast of one step.

    Attributes:
        rollouts: Rollouts per step.
        concurrency: Largest number of rollouts that run at once.
        rows: Number of training rows.
        row_tokens: Tokens of all rows together.
        trained_tokens: Tokens of the rows that train.
        prompt_tokens: Tokens of the prompts of all model calls.
        response_tokens: Tokens of all answers.
        collect_s: Seconds until all rollouts of the step are done.
    """

    rollouts: int
    concurrency: int
    rows: Spread
    row_tokens: Spread
    trained_tokens: Spread
    prompt_tokens: Spread
    response_tokens: Spread
    collect_s: Spread


def spread_of(values: Iterable[float]) -> Spread:
    """Return the distribution of the numbers; without numbers, all of its fields are 0."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    last = len(ordered) - 1
    p10, median, p90 = (ordered[round(share * last)] for share in (0.1, 0.5, 0.9))
    return Spread(mean=sum(ordered) / len(ordered), p10=p10, median=median, p90=p90, most=ordered[-1])


def makespan(durations: Sequence[float], *, concurrency: int) -> float:
    """Return the time at which the last job ends if jobs start in order, at most ``concurrency`` at once."""
    if not durations:
        return 0.0
    free = [0.0] * max(1, min(concurrency, len(durations)))
    heapify(free)
    for duration in durations:
        heapreplace(free, free[0] + duration)
    return max(free)


def forecast(
    observed: Sequence[Observed], *, tasks: int, samples: int, concurrency: int, seed: int = 0
) -> StepForecast:
    """Forecast a step of ``tasks`` groups with ``samples`` rollouts each, from at least one recorded rollout."""
    draw = random.Random(seed)  # a simulation
    batches = _batches(observed)
    warm = _batches(without_start(observed))
    idle = idle_share([[one for group in groups for one in group] for groups in warm])
    count = max(10, min(_STEPS, _ROLLOUTS // max(1, tasks * samples)))
    drawn = draw.choices(batches, [sum(map(len, groups)) for groups in batches], k=count)
    steps = [[one for _ in range(tasks) for one in draw.choices(draw.choice(groups), k=samples)] for groups in drawn]
    places = [_most_at_once([one for group in groups for one in group]) for groups in warm]
    timed = draw.choices(list(zip(warm, places, strict=True)), [sum(map(len, groups)) for groups in warm], k=count)
    times = [
        ([one.seconds for _ in range(tasks) for one in draw.choices(draw.choice(groups), k=samples)], beside)
        for groups, beside in timed
    ]
    return StepForecast(
        rollouts=tasks * samples,
        concurrency=concurrency,
        **{name: spread_of(sum(getattr(one, name) for one in step) for step in steps) for name in _COUNTED},
        collect_s=spread_of(
            _seconds(durations, concurrency=concurrency, beside=beside, idle=idle) for durations, beside in times
        ),
    )


def idle_share(batches: Sequence[Sequence[Observed]]) -> float:
    """Estimate the share of the slots left free at the end of a step that stay idle, from 0 to 1.

    If rollouts speed up while few others run, the fast ones are the last ones of a recorded step, so the step ends
    sooner in its recorded order than in a random order. The share is (recorded - even) / (random - even), where
    recorded is the time of the recorded order, random is the mean time of random orders, and even is the time of the
    work spread evenly over all slots. It is 1 if no step had more rollouts than slots.
    """
    draw = random.Random(0)  # random orders for a simulation
    lost, possible = 0.0, 0.0
    for batch in batches:
        durations = [one.seconds for one in sorted(batch, key=lambda one: one.started_at)]
        places = _most_at_once(batch)
        if len(batch) <= places:
            continue
        even = sum(durations) / places
        orders = [makespan(draw.sample(durations, len(durations)), concurrency=places) for _ in range(_ORDERS)]
        lost += makespan(durations, concurrency=places) - even
        possible += fmean(orders) - even
    return min(1.0, max(0.0, lost / possible)) if possible > 0 else 1.0


def _seconds(durations: Sequence[float], *, concurrency: int, beside: int, idle: float) -> float:
    """Return the seconds of a step, which lie between the time of its work and the time of its queue.

    ``beside`` rollouts ran at once when the durations were recorded. If they shared a processor, each took ``beside``
    times as long as its work. ``idle`` is the result of :func:`idle_share`: 0 gives the time of the work, 1 that of the
    queue.
    """
    work = sum(durations) / max(1, beside)
    return work + idle * (makespan(durations, concurrency=concurrency) - work)


def _most_at_once(observed: Sequence[Observed]) -> int:
    """Return the highest number of rollouts that ran at the same time."""
    ends = [(one.started_at + one.seconds, -1) for one in observed]
    changes = sorted([*((one.started_at, 1) for one in observed), *ends])
    return max(accumulate(change for _, change in changes), default=0)


def without_start(observed: Sequence[Observed]) -> list[Observed]:
    """Leave out the rollouts of the first step, whose time includes imports, connections and thread pools.

    All rollouts are kept if the first step has more rollouts than all others together.
    """
    first = min(observed, key=lambda one: one.started_at).batch if observed else ""
    others = [one for one in observed if one.batch != first]
    return others if 2 * len(others) >= len(observed) else list(observed)


def uncertainty_of(observed: Sequence[Observed], *, tasks: int) -> float | None:
    """Return how uncertain a rollout's mean tokens are: half the 95 % interval over all tasks, as a share of the mean.

    The share is computed for the tokens that a step computes, and for the tokens that it trains on (or, without rows,
    for those of answers); the larger one is returned. ``None`` for one task or rollouts without tokens.
    """
    computed = _uncertainty(
        [(one.group_id, one.row_tokens or (one.prompt_tokens + one.response_tokens)) for one in observed], tasks=tasks
    )
    has_rows = any(one.rows for one in observed)
    trained = [(one.group_id, one.trained_tokens if has_rows else one.response_tokens) for one in observed]
    found = [each for each in (computed, _uncertainty(trained, tasks=tasks)) if each is not None]
    return max(found, default=None)


def _uncertainty(tokens: Sequence[tuple[str, int]], *, tasks: int) -> float | None:
    """Return half the width of Student's interval of the mean over tasks, as a share of the mean.

    The variance of a task's mean has two parts. The variance between tasks vanishes as all tasks are run. The variance
    between the rollouts of one task stays, because the next rollouts will be different ones.
    """
    groups: dict[str, list[int]] = {}
    for group, count in tokens:
        groups.setdefault(group, []).append(count)
    means = [fmean(counts) for counts in groups.values()]
    if len(means) < 2 or not any(means):
        return None
    known = min(1.0, len(means) / tasks) if tasks else 0.0
    repeated = [variance(counts) / len(counts) for counts in groups.values() if len(counts) > 1]
    within = min(fmean(repeated), variance(means)) if repeated else 0.0
    spread = (variance(means) - within) * (1 - known) + within
    return student_quantile(0.975, len(means) - 1) * sqrt(spread / len(means)) / fmean(means)


def _batches(observed: Sequence[Observed]) -> list[list[list[Observed]]]:
    """Group rollouts by the step that collected them, and within a step by task."""
    found: dict[str, dict[str, list[Observed]]] = {}
    for one in observed:
        found.setdefault(one.batch, {}).setdefault(one.group_id or one.rollout_id, []).append(one)
    return [list(groups.values()) for groups in found.values()]


def at_once(observed: Sequence[Observed]) -> float:
    """Return the mean number of rollouts that ran at the same time, while at least one ran."""
    spans = [(one.started_at, one.finished_at) for one in observed if one.finished_at > one.started_at]
    busy = covered(spans)
    return sum(end - begin for begin, end in spans) / busy if busy else 0.0
