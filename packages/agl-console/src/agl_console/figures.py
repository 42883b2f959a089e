"""Figures: numbers over the steps of an experiment as lines, several in one figure, thinned to what a screen shows."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from agl.contracts import Metric
from agl.errors import ConfigError
from agl.schemas import Record
from agl_inspect.records.metrics import experiment_step
from agl_inspect.rollouts.step_tallies import StepTally

T = TypeVar("T")

REWARD, SPEED, USED, LENGTH = "reward", "tokens_per_s", "tokens_used", "tokens_per_rollout"
"""A metric, and two numbers that are made of what a run kept with its steps."""

POINTS = 1000
"""Points of a line at most; of more, evenly spread ones are drawn, with the first and the last."""


class Line(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One line of a figure, its lists of equal length.

    Attributes:
        run: The experiment.
        steps: The algorithm's own steps.
        places: The steps of all algorithms together, on which the lines of several algorithms compare.
        low: Lower ends of the intervals, ``None`` where a point has no interval; ``high`` the upper ends.
    """

    run: str
    algorithm: str
    steps: list[int]
    places: list[int]
    values: list[float]
    low: list[float | None]
    high: list[float | None]


class Figure(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Lines over the steps of all algorithms; ``is_thinned`` if some points are left out."""

    name: str
    series: list[Line]
    is_thinned: bool = False


def figure_of(name: str, metrics: Mapping[str, Sequence[Metric]]) -> Figure:
    """Return the figure of a metric with a line for each run and algorithm.

    Args:
        name: The metric's name.
        metrics: Numbers of each run in order of their steps, with the ends of intervals, ``NAME_low`` and
            ``NAME_high``, where they are known; others are left out.
    """
    series: list[Line] = []
    is_thinned = False
    for run, found in metrics.items():
        finite = [metric for metric in found if math.isfinite(metric.value)]
        ends = {(metric.algorithm, metric.step, metric.name): metric.value for metric in finite}
        lines: dict[str, list[Metric]] = {}
        for metric in finite:
            if metric.name == name:
                lines.setdefault(metric.algorithm, []).append(metric)
        series += [_line(run, algorithm, thinned(points), ends) for algorithm, points in lines.items()]
        is_thinned = is_thinned or any(len(points) > POINTS for points in lines.values())
    return Figure(name=name, series=series, is_thinned=is_thinned)


def derived(metrics: Sequence[Metric], tallies: Sequence[StepTally]) -> list[Metric]:
    """Return numbers of steps that no algorithm logs: the ends of the reward's interval, and how tokens were used."""
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


def thinned(found: Sequence[T]) -> Sequence[T]:
    """Return at most ``POINTS`` of the points of a line, evenly spread, with the first and the last."""
    if len(found) <= POINTS:
        return found
    return [found[index * (len(found) - 1) // (POINTS - 1)] for index in range(POINTS)]


SHARE = 0.9
"""Part of the best reward that is the goal by default."""


class Reached(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The first step of an algorithm whose reward is a goal or more.

    Attributes:
        step: The algorithm's own step, ``None`` if it did not get there.
        place: The steps of all algorithms together until then.
        value: The reward of that step, else the highest one so far.
    """

    run: str
    algorithm: str
    step: int | None
    place: int | None
    value: float


class Goal(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A reward, and how fast it was reached; ``is_given`` if the address names it."""

    reward: float
    is_given: bool
    reached: list[Reached]


def goal_of(metrics: Mapping[str, Sequence[Metric]], chosen: float | None) -> Goal | None:
    """Return who reached a reward after how many steps; ``None`` where no reward is logged.

    Args:
        metrics: Numbers by run.
        chosen: The reward, ``None`` for nine tenths of the highest one of all runs; of one below 0, a tenth below it.

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
    if not lines:
        return None
    best = max(metric.value for line in lines.values() for metric in line)
    goal = best - (1 - SHARE) * abs(best) if chosen is None else chosen
    reached = [_reached(run, algorithm, line, goal) for (run, algorithm), line in lines.items()]
    return Goal(reward=goal, is_given=chosen is not None, reached=reached)


def _reached(run: str, algorithm: str, line: Sequence[Metric], goal: float) -> Reached:
    first = min((metric for metric in line if metric.value >= goal), key=experiment_step, default=None)
    if first is None:
        best = max(metric.value for metric in line)
        return Reached(run=run, algorithm=algorithm, step=None, place=None, value=best)
    return Reached(run=run, algorithm=algorithm, step=first.step, place=experiment_step(first), value=first.value)
