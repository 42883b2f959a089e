"""Reduces the metrics of VERL's training workers to one number per name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTS = "agl_loss/"
"""Prefix of the names of a loss's own metrics, which are per trained token of an update."""


def plain_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics of an update without VERL's prefixes and without its metrics of memory and speed."""
    found = cast("dict[str, Any]", metrics)
    return {name.rsplit("/", 1)[-1]: _number(value) for name, value in found.items() if not name.startswith("perf/")}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics only; used for averages over updates with a skipped one."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _number(value: Any) -> float:
    """Return a number, the mean of a list over ranks or micro-batches, or the value of VERL's own metric."""
    if isinstance(value, verl_part("verl.utils.metric:Metric")):
        return float(value.aggregate())
    if isinstance(value, list):
        parts = [_number(part) for part in cast("list[Any]", value)]
        return sum(parts) / len(parts) if parts else 0.0
    return float(value)
