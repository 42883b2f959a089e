"""Finds after how many steps each algorithm of a run reached a given reward, by its logged mean rewards of steps."""

import math
from collections.abc import Mapping, Sequence

from agl.contracts import Metric
from agl.errors import ConfigError
from agl.schemas import Record
from agl_console.figures import REWARD
from agl_inspect.records.metrics import experiment_step

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
        ConfigError: ``chosen`` is no finite number.
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
