"""Adds the reports of a step's updates up to one of the step, and says which estimator has no part in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agl.errors import AglError

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
"""Metrics that count a step's updates."""


def averaged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every number over the updates that report it, and how many updates were skipped.

    One that was skipped reports less.
    """
    names = dict.fromkeys(name for report in reports for name in report)
    found = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: sum(values) / (1 if name in _COUNTS else len(values)) for name, values in found.items()}


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of numbers, 0 without any, and their standard deviation (n - 1), 0 for fewer than two."""
    mean = sum(values) / len(values) if values else 0.0
    away = [value - mean for value in values]  # products, because powers of large floats raise
    return mean, math.sqrt(sum(each * each for each in away) / (len(values) - 1)) if len(values) > 1 else 0.0


class UnusedEstimator:
    """Says once that credit leaves an estimator nothing to do, because it gives finished advantages."""

    def __init__(self, name: str) -> None:
        self._name, self._is_said = name, False

    def news(self, *, final: int, calls: int) -> str:
        """Return the notice of a step in which `final` of `calls` calls have finished advantages; `""` for none."""
        if not final or self._is_said:
            return ""
        self._is_said = True
        return (
            f"the credit gave {final} of {calls} calls finished advantages, in which "
            f'estimator = "{self._name}" has no part'
        )


MAX_NONFINITE = 3
"""Updates in a row that may be skipped, unless a setting says otherwise."""


@dataclass(slots=True)
class Skipped:
    """The updates of one model that were not made; at most `limit` in a row may be."""

    limit: int
    total: int = 0
    in_a_row: int = 0
    said: int = 0

    def news(self) -> str:
        """Return a sentence for people about the updates that were skipped since the last call, `""` without any."""
        count, self.said = self.total - self.said, self.total
        return f"{count} updates were skipped, because their gradients are not finite" if count else ""

    def note(self, norm: float, *, update: int) -> bool:
        """Take the gradient's norm of an update and return whether it was skipped.

        Raises AglError beyond the limit.
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
