"""Means, intervals and comparisons of rewards."""

from agl_inspect.statistics.comparison import (
    FEWEST_ALIKE,
    Comparison,
    Criterion,
    check_better,
    compare,
    compare_tasks,
    interval,
)
from agl_inspect.statistics.means import clamped, mean, scaled

__all__ = [
    "FEWEST_ALIKE",
    "Comparison",
    "Criterion",
    "check_better",
    "clamped",
    "compare",
    "compare_tasks",
    "interval",
    "mean",
    "scaled",
]
