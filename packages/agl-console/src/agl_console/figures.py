"""Figures: numbers over the steps of an experiment as lines, thinned to as many points as a screen shows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from agl.contracts import Metric
from agl.errors import ConfigError
from agl.schemas import Record
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


class Figure(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Lines over the steps of all algorithms, or over something else.

    Attributes:
        is_thinned: True if some points are left out.
        over: One unit of the axis.
        marks: Events on the axis.
    """

    name: str
    series: list[Line]
    is_thinned: bool = False
    over: str = "step"
    marks: list[Mark] = []

    @property
    def is_constant(self) -> bool:
        """True if every line has the same value at all of its steps."""
        return all(len(set(line.values)) == 1 for line in self.series)


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


SHARE = 0.9
"""The default goal as a share of the best reward."""


class Reached(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The first step at which an algorithm's reward reached a goal.

    Attributes:
        step: The algorithm's own step; ``None`` if the goal was not reached.
        place: The same step counted over all algorithms; ``None`` if the goal was not reached.
        value: The reward of that step, else the highest reward so far.
    """

    run: str
    algorithm: str
    step: int | None
    place: int | None
    value: float


class Goal(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A goal for the reward, and the first steps that reached it; ``is_given`` is true if the address names it."""

    reward: float
    is_given: bool
    reached: list[Reached]


def goal_of(metrics: Mapping[str, Sequence[Metric]], chosen: float | None) -> Goal | None:
    """Return the goal and the first step of each algorithm that reached it; ``None`` if no reward but 0 is logged.

    Args:
        metrics: Metrics by run.
        chosen: The goal; ``None`` for the highest reward of all runs, less a tenth of its absolute value.

    Raises:
        ConfigError: ``chosen`` is not a finite number.
    """
    if chosen is not None and not math.isfinite(chosen):
        raise ConfigError(f"no step reaches a reward of {chosen}; give goal a finite number, such as 0.8")
    lines: dict[tuple[str, str], list[Metric]] = {}
    for run, found in metrics.items():
        for metric in found:
            if metric.name == REWARD and math.isfinite(metric.value):
                lines.setdefault((run, metric.algorithm), []).append(metric)
    values = [metric.value for line in lines.values() for metric in line]
    if not any(values):
        return None
    best = max(values)
    goal = best - (1 - SHARE) * abs(best) if chosen is None else chosen
    reached = [_reached(run, algorithm, line, goal) for (run, algorithm), line in lines.items()]
    return Goal(reward=goal, is_given=chosen is not None, reached=reached)


def _reached(run: str, algorithm: str, line: Sequence[Metric], goal: float) -> Reached:
    first = min((metric for metric in line if metric.value >= goal), key=experiment_step, default=None)
    if first is None:
        best = max(metric.value for metric in line)
        return Reached(run=run, algorithm=algorithm, step=None, place=None, value=best)
    return Reached(run=run, algorithm=algorithm, step=first.step, place=experiment_step(first), value=first.value)
