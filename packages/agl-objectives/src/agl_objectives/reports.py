"""Adds the reports of a step's updates up to one of the step, and tells of an estimator that has no part in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["UnusedEstimator", "averaged"]

_COUNTS = frozenset({"updates_skipped", "updates_nonfinite", "value_updates_nonfinite"})
"""Metrics that count a step's updates."""


def averaged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every number over the updates that report it, and how many updates were skipped.

    One that was skipped reports less.
    """
    names = dict.fromkeys(name for report in reports for name in report)
    found = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: sum(values) / (1 if name in _COUNTS else len(values)) for name, values in found.items()}


class UnusedEstimator:
    """Tells once that credit leaves an estimator nothing to do, because it gives finished advantages."""

    def __init__(self, name: str) -> None:
        self._name, self._has_told = name, False

    def news(self, *, final: int, calls: int) -> str:
        """Return what to tell of a step in which `final` of `calls` calls have finished advantages; `""` for none."""
        if not final or self._has_told:
            return ""
        self._has_told = True
        return (
            f"the credit gave {final} of {calls} calls finished advantages, in which "
            f'estimator = "{self._name}" has no part'
        )
