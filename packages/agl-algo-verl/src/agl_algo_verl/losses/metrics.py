"""Metrics of VERL's training workers, reduced to one number per name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTS = "agl_loss/"
"""Beginning of the names of a loss's own metrics, each per trained token of an update."""


def plain_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics of an update without VERL's prefixes; memory and speed of its process are left out."""
    found = cast("dict[str, Any]", metrics)
    return {name.rsplit("/", 1)[-1]: _number(value) for name, value in found.items() if not name.startswith("perf/")}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers among averages over updates, one of which was skipped."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _number(value: Any) -> float:
    """Return one number for a number, a list over ranks or micro-batches, or VERL's own metric."""
    if isinstance(value, verl_part("verl.utils.metric:Metric")):
        return float(value.aggregate())
    if isinstance(value, list):
        parts = [_number(part) for part in cast("list[Any]", value)]
        return sum(parts) / len(parts) if parts else 0.0
    return float(value)
