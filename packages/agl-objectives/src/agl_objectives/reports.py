"""Combines the metrics of a step's updates, counts skipped updates, and reports an estimator without effect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agl.errors import AglError
from agl.hints import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "MAX_NONFINITE",
    "Skipped",
    "UnusedEstimator",
    "averaged",
    "mean_and_deviation",
]

_COUNTS = frozenset({"updates_skipped", "updates_nonfinite", "value_updates_nonfinite"})
"""Metrics that are summed over the updates of a step, because they count updates."""


def averaged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every metric over the updates that report it; metrics that count updates are summed.

    An update that was skipped reports fewer metrics.
    """
    names = dict.fromkeys(name for report in reports for name in report)
    found = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: sum(values) / (1 if name in _COUNTS else len(values)) for name, values in found.items()}


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of numbers (0 for no numbers) and the standard deviation with n - 1 (0 for fewer than two)."""
    mean = sum(values) / len(values) if values else 0.0
    away = [value - mean for value in values]  # multiplied below, because ** raises for large floats
    return mean, math.sqrt(sum(each * each for each in away) / (len(values) - 1)) if len(values) > 1 else 0.0


class UnusedEstimator:
    """Reports once that an estimator has no effect on calls whose credit is a finished advantage."""

    def __init__(self, name: str) -> None:
        self._name, self._is_said = name, False

    def news(self, *, final: int, calls: int) -> str:
        """Return a notice for the first step in which calls have finished advantages; `""` for every other step.

        `final` of the step's `calls` calls have finished advantages.
        """
        if not final or self._is_said:
            return ""
        self._is_said = True
        return (
            f"the credit gave {final} of {calls} calls finished advantages, which "
            f'estimator = "{self._name}" does not change'
        )


MAX_NONFINITE = 3
"""Default of the largest number of successive updates that may be skipped."""


@dataclass(slots=True)
class Skipped:
    """Counts the updates of one model that were skipped because their gradient is not finite.

    Attributes:
        limit: Largest number of skipped updates in a row.
        total: Number of skipped updates.
        in_a_row: Number of skipped updates since the last one that was made.
        said: Number of skipped updates that `news` has reported.
    """

    limit: int
    total: int = 0
    in_a_row: int = 0
    said: int = 0

    def news(self) -> str:
        """Return a notice about the updates that were skipped since the last call, `""` if there are none."""
        count, self.said = self.total - self.said, self.total
        verb = "was" if count == 1 else "were"
        return f"{count_of(count, 'update')} {verb} skipped: gradients are not finite" if count else ""

    def note(self, norm: float, *, update: int) -> bool:
        """Count an update by its gradient norm; return true if it was skipped because the norm is not finite.

        Raises AglError if more than `limit` updates in a row were skipped.
        """
        if math.isfinite(norm):
            self.in_a_row = 0
            return False
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            raise AglError(
                f"The gradient norm of update {update} is {norm}: {self.in_a_row} in a row are not finite, and "
                f"max_nonfinite = {self.limit}. None of these updates was made. Lower lr, train in float32 instead of "
                "float16, or raise max_nonfinite."
            )
        return True
