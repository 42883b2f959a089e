"""Estimates how much of the reward goes with each pattern, among rollouts of one task in one step.

    reward - cell mean  =  sum over the patterns of  beta_j * (x_j - cell mean of x_j)  +  rest

A cell is a task in a step, so neither the difficulty of a task nor the progress of the run is taken for a pattern. The
x are log2(1 + count), because the tenth emoji says less than the first, and are scaled to one standard deviation within
cells. The standard errors are those of the jackknife over tasks (CR3, Bell and McCaffrey 2002), which are rather too
large than too small for few tasks, with Student's t. The intervals hold for all patterns together with 95 %: of
patterns that have nothing to do with the reward, one is found to raise it in at most 2.5 % of the runs.

Limits: a pattern may go with the reward because right answers have it. The regression is linear, so a pattern that goes
together with one that pays may get a small part of its effect.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import mul
from statistics import fmean
from typing import NamedTuple

from agl.schemas import Record
from agl_inspect.statistics import student_quantile

ERROR = 0.05
"""The probability with which any of the intervals misses its effect."""

_LEAST = 5
"""The least number of tasks from which effects are estimated."""

_RIDGE = 1e-9
"""A ridge relative to each pattern's own scale, which makes doubled patterns harmless."""

_Products = list[list[float]]
"""The sums of products of the patterns and, last, the reward, over the rollouts of one task or more."""


class Sample(NamedTuple):
    """A rollout: its task and step, its reward, the counts of the patterns, its gold reward and its answer."""

    task: str
    step: int
    reward: float
    counts: Sequence[float]
    gold: float | None = None
    rollout_id: str = ""
    answer: str = ""


class Effect(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The reward that goes with one standard deviation of a pattern, its interval, and the share it explains.

    ``low`` and ``high`` are ``None`` if the pattern varies in too few tasks. ``share`` is the part of the rewards'
    variance within cells by which the fit gets worse without the pattern.
    """

    value: float
    low: float | None
    high: float | None
    share: float


def effects(samples: Sequence[Sample]) -> list[Effect]:
    """Estimate the effects of all patterns; of none without enough tasks whose rollouts can be compared."""
    rows: defaultdict[str, list[list[float]]] = defaultdict(list)
    for one, row in within_cells(samples):
        rows[one.task].append(row)
    tasks = [_products(task) for task in rows.values()]
    total = _products([row for task in rows.values() for row in task])
    if len(tasks) < _LEAST or not total[-1][-1]:
        return []
    fits = [_fitted(_less(total, task)) for task in tasks]
    width, count, found = len(total) - 1, sum(map(len, rows.values())), list[Effect]()
    for j, (beta, inverse) in enumerate(_fitted(total)):
        scale = math.sqrt(total[j][j] / count)
        error = math.sqrt((len(fits) - 1) / len(fits) * sum((fit[j][0] - beta) ** 2 for fit in fits))
        # A pattern that varies in few tasks has few degrees of freedom, however many tasks there are.
        freedom = total[j][j] ** 2 / sum(task[j][j] ** 2 for task in tasks) - 1 if scale else 0.0
        half = student_quantile(1 - ERROR / 2 / width, freedom) * error if freedom >= 1 else None
        low, high = (None, None) if half is None else ((beta - half) * scale, (beta + half) * scale)
        found.append(Effect(value=beta * scale, low=low, high=high, share=beta * beta / inverse / total[-1][-1]))
    return found


def within_cells(samples: Sequence[Sample]) -> Iterator[tuple[Sample, list[float]]]:
    """Yield each sample with the differences of its patterns and reward from the cell's; no cells of one rollout."""
    cells: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for one in samples:
        cells[one.task, one.step].append(one)
    for cell in cells.values():
        rows = [[*(math.log2(1 + count) for count in one.counts), one.reward] for one in cell]
        means = [fmean(column) for column in zip(*rows, strict=True)]
        for one, row in zip(cell, rows, strict=True) if len(cell) > 1 else ():
            yield one, [x - mean for x, mean in zip(row, means, strict=True)]


def _products(rows: Sequence[Sequence[float]]) -> _Products:
    columns = list(zip(*rows, strict=True))
    return [[sum(map(mul, one, other)) for other in columns] for one in columns]


def _less(total: _Products, part: _Products) -> _Products:
    return [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(total, part, strict=True)]


def _fitted(products: _Products) -> list[tuple[float, float]]:
    """Return each pattern's coefficient and diagonal element of the inverse; (0, 1) for a constant pattern.

    The square of the first divided by the second is the sum of squares that the pattern explains and no other does.
    """
    rows = [list(row) for row in products]
    used = [j for j in range(len(rows) - 1) if rows[j][j] > 1e-9]
    for j in used:
        rows[j][j] *= 1 + _RIDGE
    for j in used:  # the sweep operator (Goodnight 1979)
        swept = [x / rows[j][j] for x in rows[j]]
        swept[j] = 1 / rows[j][j]
        for row in rows:
            factor, row[j] = row[j], 0.0
            row[:] = [a - factor * b for a, b in zip(row, swept, strict=True)]
        rows[j] = swept
    return [(rows[j][-1], rows[j][j]) if j in used else (0.0, 1.0) for j in range(len(rows) - 1)]
