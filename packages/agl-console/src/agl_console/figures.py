"""Figures: numbers over the steps of an experiment as lines, thinned to as many points as a screen shows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from agl.contracts import Metric
from agl.schemas import Record
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.records.metrics import experiment_step
from agl_inspect.rollouts.step_tallies import StepTally

T = TypeVar("T")

REWARD, SPEED, USED, LENGTH = "reward", "tokens_per_s", "tokens_used", "tokens_per_rollout"
"""Names of metrics: the logged ``reward``, and three that :func:`derived` computes from it and the tallies."""

POINTS = 1000
"""The most points of a line; of a longer line, evenly spread points are drawn, with the first and the last."""


class Line(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One line of a figure; all its lists have the same length.

    Attributes:
        run: The experiment.
        steps: The algorithm's own steps.
        places: The steps of all algorithms together, a common axis for the lines of several algorithms.
        low: Lower ends of the intervals; ``None`` for a point without an interval.
        high: Upper ends of the intervals; ``None`` for a point without an interval.
    """

    run: str
    algorithm: str
    steps: list[int]
    places: list[int]
    values: list[float]
    low: list[float | None]
    high: list[float | None]


class Mark(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An event at a place of a figure's axis.

    Attributes:
        kind: ``published``, ``best``, ``back``, ``alert``, or ``shown`` for the version that a page is about.
        version: The version that was published.
        address: The parts of the address of the page with the evidence, and its parameters in ``query``.
    """

    place: int
    kind: str
    text: str
    version: str = ""
    address: list[str] = []
    query: dict[str, Any] = {}


class Stretch(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Steps of one algorithm in a row: the places ``first`` to ``last``, and the algorithm's own step at ``first``."""

    algorithm: str
    first: int
    last: int
    step: int


class Figure(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Lines over the steps of all algorithms, or over something else.

    Attributes:
        is_thinned: True if some points are left out.
        over: One unit of the axis.
        marks: Events on the axis.
        stretches: The algorithms along the axis, so that a place is shown as a step of its algorithm.
    """

    name: str
    series: list[Line]
    is_thinned: bool = False
    over: str = "step"
    marks: list[Mark] = []
    stretches: list[Stretch] = []

    @property
    def is_constant(self) -> bool:
        """True if every line has the same value at all of its steps."""
        return all(len(set(line.values)) == 1 for line in self.series)


def stretches_of(metrics: Sequence[Metric]) -> list[Stretch]:
    """Return the stretches of a run in order; none if its algorithms alternate too often to be named on an axis."""
    found: list[Stretch] = []
    known = {(experiment_step(metric), metric.algorithm, metric.step) for metric in metrics}
    for place, algorithm, step in sorted(each for each in known if each[1] != VALIDATE):
        last = found[-1] if found else None
        if last and (algorithm, place, step) == (last.algorithm, last.last + 1, last.step + place - last.first):
            found[-1] = replace(last, last=place)
        else:
            found.append(Stretch(algorithm=algorithm, first=place, last=place, step=step))
    return found if len(found) <= POINTS else []


def step_at(stretches: Sequence[Stretch], place: int) -> str:
    """Return the step at a place, such as ``grpo 12``; ``the start`` for place 0, else the place itself."""
    own = next((each for each in stretches if each.first <= place <= each.last), None)
    return f"{own.algorithm} {own.step + place - own.first}" if own else f"step {place}" if place else "the start"


def figure_of(name: str, metrics: Mapping[str, Sequence[Metric]]) -> Figure:
    """Return the figure of a metric, with a line for each run and algorithm.

    Args:
        name: The metric's name.
        metrics: The metrics of each run, in order of their steps. ``NAME_low`` and ``NAME_high`` give the ends of
            intervals; metrics with other names are ignored.
    """
    series: list[Line] = []
    is_thinned = False
    for run, found in metrics.items():
        ends: dict[tuple[str, int, str], float] = {}
        lines: dict[str, list[Metric]] = {}
        for metric in (metric for metric in found if math.isfinite(metric.value)):
            if metric.name == name:
                lines.setdefault(metric.algorithm, []).append(metric)
            else:
                ends[metric.algorithm, metric.step, metric.name] = metric.value
        series += [_line(run, algorithm, thinned(points), ends) for algorithm, points in lines.items()]
        is_thinned = is_thinned or any(len(points) > POINTS for points in lines.values())
    return Figure(name=name, series=series, is_thinned=is_thinned)


def derived(metrics: Sequence[Metric], tallies: Sequence[StepTally]) -> list[Metric]:
    """Return metrics that no algorithm logs: the reward's interval, tokens per second and rollout, and token use."""
    known = {(metric.algorithm, metric.step, metric.name): metric for metric in metrics}
    found: list[Metric] = []
    for tally in tallies:
        at = tally.algorithm, tally.step
        reward, collect_s = known.get((*at, REWARD)), known.get((*at, "collect_s"))
        is_trained = tally.mode == "train"
        speed = tally.tokens / collect_s.value if is_trained and collect_s and collect_s.value > 0 else None
        used = tally.trained / tally.tokens if is_trained and tally.trained and tally.tokens else None
        length = tally.tokens / tally.rollouts if is_trained and tally.tokens and tally.rollouts else None
        ends = {f"{REWARD}_low": tally.low, f"{REWARD}_high": tally.high}
        numbers = {**ends, SPEED: speed, USED: used, LENGTH: length}
        found += [
            replace(reward, name=part, value=value)
            for part, value in numbers.items()
            if reward is not None and value is not None and (*at, part) not in known
        ]
    return found


def _line(run: str, algorithm: str, found: Sequence[Metric], ends: dict[tuple[str, int, str], float]) -> Line:
    low, high = (
        [ends.get((algorithm, metric.step, f"{metric.name}_{end}")) for metric in found] for end in ("low", "high")
    )
    steps, values = [metric.step for metric in found], [metric.value for metric in found]
    places = [experiment_step(metric) for metric in found]
    return Line(run=run, algorithm=algorithm, steps=steps, places=places, values=values, low=low, high=high)


def line_of(run: str, name: str, points: Sequence[tuple[int, int, float]]) -> Line:
    """Return a line without intervals from its points, each a step, its place and a value."""
    shown = thinned(points)
    none: list[float | None] = [None] * len(shown)
    return Line(
        run=run,
        algorithm=name,
        steps=[step for step, _, _ in shown],
        places=[place for _, place, _ in shown],
        values=[value for _, _, value in shown],
        low=none,
        high=none,
    )


def thinned(found: Sequence[T], most: int = POINTS) -> Sequence[T]:
    """Return at most ``most`` of a line's points, evenly spread, with the first and the last."""
    if len(found) <= most:
        return found
    return [found[index * (len(found) - 1) // (most - 1)] for index in range(most)]


WIDTH, HEIGHT, SPARK_POINTS = 120, 32, 120


class Stroke(Record, frozen=True, kw_only=True):
    """The SVG paths of a line of a sparkline and of its interval, in a box of ``WIDTH`` by ``HEIGHT``."""

    line: str
    band: str


def sparks(lines: Sequence[Line]) -> list[Stroke]:
    """Return the paths of a sparkline, all lines on one scale; a constant runs through the middle."""
    points = [_spark_points(line) for line in lines]
    places = [place for line in points for place, *_ in line]
    heights = [height for line in points for _, *values in line for height in values]
    if not places:
        return []
    left, wide = min(places), max(places) - min(places) or 1
    bottom, tall = min(heights), max(heights) - min(heights)

    def at(place: int, value: float) -> str:
        height = (value - bottom) / tall if tall else 0.5
        return f"{(place - left) / wide * WIDTH:.1f} {2 + (1 - height) * (HEIGHT - 4):.1f}"

    return [
        Stroke(
            line="M" + "L".join(at(place, value) for place, value, _, _ in line),
            band="M"
            + "L".join([*(at(p, high) for p, _, _, high in line), *(at(p, low) for p, _, low, _ in line[::-1])]),
        )
        for line in points
    ]


def _spark_points(line: Line) -> list[tuple[int, float, float, float]]:
    """Return places with values and their intervals; a value without an interval has one of no width."""
    found = zip(line.places, line.values, line.low, line.high, strict=True)
    shown = thinned(list(found), SPARK_POINTS)
    return [(p, v, v if low is None else low, v if high is None else high) for p, v, low, high in shown]
