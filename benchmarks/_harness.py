"""Shared parts of all benchmarks: interleaved repeats, medians, and one table row per figure.

A case is a function that does some work and returns how many units it did. All cases of one comparison run in turn,
several times, so that a busy neighbour slows each of them alike; the medians are compared. Wall time and the CPU time
of this process (all threads) are taken; trust CPU and ratios more than wall time on a shared machine.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from agl import PluginManager
from agl.contracts import Kind

Case = Callable[[], int]


def component(kind: Kind, name: str, /, **params: Any) -> Any:
    """A component of an installed plugin, by its name."""
    manager = PluginManager.from_environment()
    return manager.build(manager.entry(kind, name), **params)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case with work before it that is not measured: ``act`` gets what ``prepare`` made, each time anew."""

    prepare: Callable[[], Any]
    act: Callable[[Any], int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Medians of one case; seconds per unit of work."""

    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Units per second of wall time."""
        return 1.0 / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        value: What was measured, in ``unit``.
        bar: What it has to reach.
        better: Whether ``value`` should be above or below the bar.
        baseline: The same unit, taken in the same run from what ``baseline_name`` says.
        cpu_us: CPU microseconds per unit of work, where that means something.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    better: Literal["higher", "lower"] = "higher"
    baseline: float | None = None
    baseline_name: str = ""
    cpu_us: float | None = None

    @property
    def is_met(self) -> bool:
        """Return true if the bar is reached or there is none."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar


def interleave(cases: Mapping[str, Case | Prepared], *, repeats: int = 5) -> dict[str, Sample]:
    """Run all cases in turn ``repeats`` times; returns each one's medians by name."""
    walls: dict[str, list[float]] = {name: [] for name in cases}
    cpus: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            run = partial(case.act, case.prepare()) if isinstance(case, Prepared) else case
            wall, cpu = time.perf_counter(), time.process_time()
            units = run()
            cpus[name].append((time.process_time() - cpu) / units)
            walls[name].append((time.perf_counter() - wall) / units)
    return {name: Sample(wall_s=statistics.median(walls[name]), cpu_s=statistics.median(cpus[name])) for name in cases}


def rate_figure(name: str, sample: Sample, *, bar: float | None, baseline: Sample, baseline_name: str) -> Figure:
    """A figure in units per second."""
    return Figure(
        name=name,
        value=sample.rate,
        unit="/s",
        bar=bar,
        baseline=baseline.rate,
        baseline_name=baseline_name,
        cpu_us=sample.cpu_s * 1e6,
    )


def table(figures: Iterable[Figure]) -> str:
    """The figures as an aligned table, one per line."""
    rows = [("figure", "measured", "bar", "", "CPU us", "baseline", "ratio", "what the baseline is")]
    rows.extend(_row(figure) for figure in figures)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(figure: Figure) -> tuple[str, ...]:
    sign = {"higher": ">=", "lower": "<="}[figure.better]
    ratio = "" if not figure.baseline else f"{figure.value / figure.baseline:.2f}"
    return (
        figure.name,
        f"{_number(figure.value)} {figure.unit}",
        "" if figure.bar is None else f"{sign} {_number(figure.bar)}",
        "ok" if figure.is_met else "MISSED",
        "" if figure.cpu_us is None else _number(figure.cpu_us),
        "" if figure.baseline is None else _number(figure.baseline),
        ratio,
        figure.baseline_name,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
