"""Estimates how much of the reward goes with each pattern, among rollouts of one task in one step.

    reward - cell mean  =  sum over the patterns of  beta_j * (x_j - cell mean of x_j)  +  rest

A cell is a task in a step, so neither the difficulty of a task nor the progress of the run is taken for a pattern. The
x are scaled to one standard deviation within cells. The standard errors are those of the jackknife over tasks (CR3,
Bell and McCaffrey 2002), which are rather too large than too small for few tasks, with Student's t. The intervals hold
for all patterns together with 95 %: of patterns that have nothing to do with the reward, one is found to raise it in at
most 2.5 % of the runs.

Limits: a pattern may go with the reward because right answers have it. The regression is linear, so a pattern that goes
together with one that pays may get a small part of its effect.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from agl_inspect.statistics import student_quantile

ERROR = 0.05
"""The probability with which any of the intervals misses its effect."""

_LEAST = 5
"""The least number of tasks from which effects are estimated."""

_RIDGE = 1e-9


class Sample(NamedTuple):
    """A rollout: its task and step, its reward, and the values of the patterns."""

    task: str
    step: int
    reward: float
    values: Sequence[float]


class Effect(NamedTuple):
    """The reward that goes with one standard deviation of a pattern, its interval, and the share it explains.

    ``share`` is the part of the rewards' variance within cells by which the fit gets worse without the pattern.
    """

    value: float
    low: float
    high: float
    share: float


class _Sums:
    """The sums of products of the rollouts of one task or more: of the patterns, and with the reward."""

    def __init__(self, width: int) -> None:
        self.xx = [[0.0] * width for _ in range(width)]
        self.xy = [0.0] * width
        self.yy = 0.0

    def add(self, xs: Sequence[float], y: float) -> None:
        self.yy += y * y
        for i, x in enumerate(xs):
            self.xy[i] += x * y
            for j, other in enumerate(xs):
                self.xx[i][j] += x * other

    def less(self, other: "_Sums") -> "_Sums":
        found = _Sums(len(self.xy))
        found.xx = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(self.xx, other.xx, strict=True)]
        found.xy = [a - b for a, b in zip(self.xy, other.xy, strict=True)]
        found.yy = self.yy - other.yy
        return found


def effects(samples: Sequence[Sample]) -> list[Effect] | None:
    """Estimate the effects of all patterns; ``None`` without enough tasks whose rollouts can be compared."""
    rows = _within_cells(samples)
    width = len(samples[0].values) if samples else 0
    tasks: defaultdict[str, _Sums] = defaultdict(lambda: _Sums(width))
    total = _Sums(width)
    for task, xs, y in rows:
        tasks[task].add(xs, y)
        total.add(xs, y)
    if len(tasks) < _LEAST or not total.yy:
        return None
    betas = _solved(total, range(width))
    fits = [_solved(total.less(sums), range(width)) for sums in tasks.values()]
    count, scales = len(fits), [math.sqrt(total.xx[j][j] / len(rows)) for j in range(width)]
    found: list[Effect] = []
    for j, (beta, scale) in enumerate(zip(betas, scales, strict=True)):
        error = math.sqrt((count - 1) / count * sum((fit[j] - beta) ** 2 for fit in fits))
        others = [i for i in range(width) if i != j]
        share = (_explained(total, range(width)) - _explained(total, others)) / total.yy
        # A pattern that varies in few tasks has few degrees of freedom, however many tasks there are.
        varied = [sums.xx[j][j] for sums in tasks.values()]
        freedom = sum(varied) ** 2 / sum(x * x for x in varied) - 1 if scale else 0.0
        half = student_quantile(1 - ERROR / 2 / width, freedom) * error if freedom >= 1 else math.inf
        low, high = beta - half, beta + half
        found.append(Effect(beta * scale, low * (scale or 1), high * (scale or 1), max(0.0, share)))
    return found


def _within_cells(samples: Sequence[Sample]) -> list[tuple[str, list[float], float]]:
    """Return (task, values, reward) as differences from the means of the cell, without cells of one rollout."""
    cells: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for one in samples:
        cells[one.task, one.step].append(one)
    found: list[tuple[str, list[float], float]] = []
    for (task, _), cell in cells.items():
        if len(cell) > 1:
            reward, means = (
                fmean(one.reward for one in cell),
                [fmean(xs) for xs in zip(*(c.values for c in cell), strict=True)],
            )
            for one in cell:
                found.append((task, [x - m for x, m in zip(one.values, means, strict=True)], one.reward - reward))
    return found


def _explained(sums: _Sums, columns: Sequence[int]) -> float:
    """Return the sum of squares that a regression on some of the patterns explains."""
    betas = _solved(sums, columns)
    return sum(betas[j] * sums.xy[j] for j in columns)


def _solved(sums: _Sums, columns: Sequence[int]) -> list[float]:
    """Return the coefficients of a regression on some of the patterns; 0 for the others and for constant ones."""
    # A tiny ridge relative to each pattern's own scale makes constant and doubled patterns harmless.
    used = [j for j in columns if sums.xx[j][j] > 1e-12]
    rows = [[sums.xx[i][j] * (1 + _RIDGE * (i == j)) for j in used] + [sums.xy[i]] for i in used]
    for place in range(len(rows)):
        pivot = max(range(place, len(rows)), key=lambda at: abs(rows[at][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        for at in range(len(rows)):
            if at != place and rows[place][place]:
                factor = rows[at][place] / rows[place][place]
                rows[at] = [a - factor * b for a, b in zip(rows[at], rows[place], strict=True)]
    found = [0.0] * len(sums.xy)
    for place, j in enumerate(used):
        found[j] = rows[place][-1] / rows[place][place] if rows[place][place] else 0.0
    return found
