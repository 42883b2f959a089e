"""The view of a run's machinery: the time of each part of a step, workers, queue and alerts.

The time between the metrics of two steps that no metric accounts for is shown as the rest.
"""

import math
from collections.abc import Mapping, Sequence

from agl.contracts import Metric, RolloutQuery, Store
from agl.schemas import Record, RolloutStatus
from agl_console.reading import run_of
from agl_console.runs import Cost, cost_of
from agl_inspect.advice.suggestions import Alert, read_alerts
from agl_inspect.presence import ListedWorker, list_workers
from agl_inspect.records.metrics import experiment_step

STEPS = 25
"""The most steps on a page."""

ALERTS = 100
"""The most alerts in the list; the newest are shown."""

COUNTED = 1000
"""The largest count of queued or running rollouts; counting stops there, because it costs more in a larger store."""

PARTS = {
    "collect_s": "rollouts",
    "old_log_prob_s": "log-probabilities",
    "update_s": "update",
    "update_critic_s": "update of the critic",
    "weight_sync_s": "publish",
    "save_s": "save",
}
"""Metrics in seconds that are shown as the parts of a step, in the order of their execution."""

_TRAIN = "train_s"
"""The metric with the seconds of the training phase, which include those of some metrics in ``PARTS``."""


class SystemFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page; it shows steps below ``before``, counted over all algorithms."""

    before: int | None = None


class Part(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A part of a step; ``start`` is in seconds from the beginning of the step."""

    name: str
    start: float
    seconds: float


class StepTimes(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A step, with its parts in sequence.

    Attributes:
        place: The step's number, counted over all algorithms.
        seconds: The time from the metrics of the previous step, of any algorithm, to those of this step; the sum of the
            parts if that time is unknown or shorter.
    """

    algorithm: str
    step: int
    place: int
    ended_at: float
    seconds: float
    parts: list[Part]


class SystemView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The machinery of a run.

    Attributes:
        cost: The cost of the finished rollouts of all runs of this experiment.
        alerts: The findings of rules in the run, and its reactions to a collapse, the newest first.
        longest: The length of the time axis in seconds: that of the longest step, whose rest counts up to three times
            its parts.
        queued: The number of queued rollouts; ``COUNTED`` means this many or more.
        running: The number of running rollouts; ``COUNTED`` means this many or more.
        next: The query of the page with older steps; empty on the last.
    """

    name: str
    alerts: list[Alert]
    steps: list[StepTimes]
    longest: float
    workers: list[ListedWorker]
    cost: Cost
    queued: int
    running: int
    counted: int
    next: dict[str, str]


async def system_view(store: Store, name: str, chosen: SystemFilter) -> SystemView:
    """Read the machinery of a run; raises :class:`NotFoundError` for an unknown run."""
    record = await run_of(store, name)
    metrics = [metric for part in (*PARTS, _TRAIN) for metric in await store.metrics(name, name=part, run=record.run)]
    every = steps_of(metrics)
    behind = [step for step in every if chosen.before is None or step.place < chosen.before]
    return SystemView(
        name=name,
        alerts=(await read_alerts(store, name, record.run))[::-1][:ALERTS],
        steps=behind[:STEPS],
        longest=max((_length(step) for step in behind[:STEPS]), default=0.0),
        workers=await list_workers(store, name),
        cost=await cost_of(store, name),
        queued=await _count(store, name, "queued"),
        running=await _count(store, name, "running"),
        counted=COUNTED,
        next={"before": str(behind[STEPS - 1].place)} if len(behind) > STEPS else {},
    )


def steps_of(metrics: Sequence[Metric]) -> list[StepTimes]:
    """Return the steps with their parts, the newest first."""
    values: dict[tuple[float, int, str, int], dict[str, float]] = {}
    ended: dict[tuple[int, str, int], float] = {}
    for metric in metrics:
        key = (experiment_step(metric), metric.algorithm, metric.step)
        ended[key] = max(ended.get(key, 0.0), metric.time)
    for metric in metrics:
        key = (experiment_step(metric), metric.algorithm, metric.step)
        if math.isfinite(metric.value) and metric.value >= 0:
            values.setdefault((ended[key], *key), {})[metric.name] = metric.value
    found: list[StepTimes] = []
    before = 0.0
    for (now, place, algorithm, step), seconds in sorted(values.items()):
        parts = _parts(seconds)
        recorded = sum(part.seconds for part in parts)
        rest = now - before - recorded if before and now else 0.0
        if rest > 0:
            parts.append(Part(name="rest", start=recorded, seconds=rest))
        length = recorded + max(0.0, rest)
        found.append(StepTimes(algorithm=algorithm, step=step, place=place, ended_at=now, seconds=length, parts=parts))
        before = now
    return found[::-1]


def _parts(seconds: Mapping[str, float]) -> list[Part]:
    """Return the parts of a step in order; training time that no other metric covers is a separate part."""
    named = [(words, seconds[name]) for name, words in PARTS.items() if name in seconds]
    inside = sum(seconds.get(name, 0.0) for name in PARTS if name != "collect_s")
    if seconds.get(_TRAIN, 0.0) > inside:
        named.append(("other training", seconds[_TRAIN] - inside))
    parts: list[Part] = []
    start = 0.0
    for words, value in named:
        parts.append(Part(name=words, start=start, seconds=value))
        start += value
    return parts


def _length(step: StepTimes) -> float:
    """Return the seconds of a step on the axis; a long pause between sessions is cut, as it would dwarf other steps."""
    recorded = sum(part.seconds for part in step.parts if part.name != "rest")
    return min(step.seconds, 4 * recorded)


async def _count(store: Store, name: str, status: RolloutStatus) -> int:
    return len(await store.rollouts(RolloutQuery(experiment=name, status=(status,), limit=COUNTED)))
