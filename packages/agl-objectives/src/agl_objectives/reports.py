"""Adds the reports of a step's updates up to one of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["averaged"]

_COUNTS = frozenset({"updates_skipped", "updates_nonfinite", "value_updates_nonfinite"})
"""Metrics that count a step's updates."""


def averaged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every number over the updates that report it, and how many updates were skipped.

    One that was skipped reports less.
    """
    names = dict.fromkeys(name for report in reports for name in report)
    found = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: sum(values) / (1 if name in _COUNTS else len(values)) for name, values in found.items()}
