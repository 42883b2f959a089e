"""Draws curves of metrics, as text for a terminal or as a picture with matplotlib."""

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click

from agl.errors import ConfigError
from agl.schemas import ResourceVersion
from agl_inspect.records.metrics import LoggedRun, experiment_step
from agl_inspect.text import visible

STEP = "step"
"""The default horizontal axis: the number of steps that all algorithms of the experiment have taken together."""

HEIGHT = 14
"""Number of lines of a chart in the terminal."""

LABELLED = 8
"""The most published versions of a curve that a picture labels; every published version gets a mark."""

_MARKS = "●○△■□◆◇"
_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
_STYLES = ("-", "--", "-.", ":")
_INTERVAL, _SEVERAL, _PUBLISHED = "░", "+", "▲"


class Point(NamedTuple):
    """A value at a position on the horizontal axis, with its interval, both of whose ends are the value if unknown."""

    x: float
    value: float
    low: float
    high: float


class Curve(NamedTuple):
    """A metric of one algorithm in one run, and the versions that the algorithm published on the way.

    Attributes:
        over: The metric on the horizontal axis, or :data:`STEP`.
        points: The points, in order of the steps.
        published: The position on the horizontal axis, and the name, of each published version.
        label: The name of the curve in the legend.
        color: Index of the curve's run; all curves of a run have the same colour in all charts.
        style: Index of the curve's algorithm.
    """

    metric: str
    over: str
    points: list[Point]
    published: list[tuple[float, str]]
    label: str
    color: int
    style: int

    @property
    def last(self) -> str:
        """The last value with its interval and its position on the horizontal axis."""
        x, value, low, high = self.points[-1]
        return f"{value:.4g}{f' [{low:.4g}, {high:.4g}]' if low < high else ''} at {self.over} {x:.10g}"


def curves_of(runs: Sequence[LoggedRun], versions: Sequence[ResourceVersion], *, over: str) -> list[Curve]:
    """Return a curve for each run, algorithm and metric that has a finite value.

    Args:
        runs: The runs, with the metrics to draw in ``found``. The ends of intervals and the metric ``over`` are looked
            up in ``every``.
        versions: The versions in the store, of all experiments.
        over: The metric on the horizontal axis, or :data:`STEP`.
    """
    algorithms = list(dict.fromkeys(metric.algorithm for each in runs for metric in each.found))
    return [
        Curve(
            metric=name,
            over=over,
            points=points,
            published=list(_published(algorithm, each, versions, over=over)),
            label=" ".join([*_run_words(each, runs), algorithm]),
            color=color,
            style=algorithms.index(algorithm),
        )
        for color, each in enumerate(runs)
        for (algorithm, name), points in _points(each, over=over).items()
    ]


def _points(of: LoggedRun, *, over: str) -> dict[tuple[str, str], list[Point]]:
    """Return the points of a run's curves, by algorithm and metric."""
    known = {(m.algorithm, m.step, m.name): m.value for m in of.every if math.isfinite(m.value)}
    points: dict[tuple[str, str], list[Point]] = {}
    for metric in of.found:
        x = float(experiment_step(metric)) if over == STEP else known.get((metric.algorithm, metric.step, over))
        if x is not None and math.isfinite(metric.value):
            ends = [known.get((metric.algorithm, metric.step, f"{metric.name}_{end}")) for end in ("low", "high")]
            low, high = (metric.value if end is None else end for end in ends)
            points.setdefault((metric.algorithm, metric.name), []).append(Point(x, metric.value, low, high))
    return points


def _run_words(of: LoggedRun, runs: Sequence[LoggedRun]) -> list[str]:
    """Return the words that distinguish a run in a legend: its experiment and its number, if they differ."""
    is_named = any(other.experiment != of.experiment for other in runs)
    is_numbered = sum(other.experiment == of.experiment for other in runs) > 1
    return [of.experiment] * is_named + [f"run {of.run}"] * is_numbered


def _published(
    algorithm: str, of: LoggedRun, versions: Sequence[ResourceVersion], *, over: str
) -> Iterator[tuple[float, str]]:
    """Yield the axis position and the name of each version that the algorithm published in the run."""
    own = [m for m in of.every if m.algorithm == algorithm and over in (STEP, m.name)]
    places = {m.step: experiment_step(m) if over == STEP else m.value for m in own}
    for version in versions:
        name = f"{of.experiment}-{of.run}-{algorithm}-{version.step}"  # the second version of a step ends with .2
        is_own = version.algorithm == algorithm and f"{version.version}.".startswith(f"{name}.")
        if is_own and version.step in places and not version.metadata.get("candidate"):
            yield float(places[version.step]), f"{version.name}@{version.version}"


def text_chart(curves: Sequence[Curve], *, width: int) -> str:
    """Draw curves of one metric on common axes, with a legend of their last values.

    Each column shows the mean of a curve's values in that column; a plus sign stands where several curves share a cell.
    The interval is shaded if there is only one curve, and published versions are marked below if there is only one run.
    Every line of the diagram fits ``width``. Colours are escape sequences, which :func:`click.echo` removes if the
    output is not a terminal.
    """
    every = [point for curve in curves for point in curve.points]
    low, high = min(point.low for point in every), max(point.high for point in every)
    first, last = min(point.x for point in every), max(point.x for point in every)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    size = max(8, width - margin - 3)
    if curves[0].over == STEP:
        size = min(size, 1 + 4 * round(last - first))

    def column(x: float) -> int:
        return _nearest(_share(x, first, last) * (size - 1))

    def row(value: float) -> int:
        return HEIGHT - 1 - _nearest(_share(value, low, high) * (HEIGHT - 1))

    cells: dict[tuple[int, int], str] = {}
    for index, curve in enumerate(curves):
        columns: dict[int, list[Point]] = {}
        for point in curve.points:
            columns.setdefault(column(point.x), []).append(point)
        for at, points in columns.items():
            value, bottom, top = (fmean(numbers) for numbers in list(zip(*points, strict=True))[1:])
            if len(curves) == 1:
                cells |= {(line, at): _INTERVAL for line in range(row(top), row(bottom) + 1)}
            here = (row(value), at)
            cells[here] = _SEVERAL if cells.get(here, _INTERVAL) != _INTERVAL else _mark(curve, index)
    lines = [
        f"{label:>{margin}} ┤{''.join(cells.get((line, at), ' ') for at in range(size)).rstrip()}"
        for line, label in enumerate(labels)
    ]
    published = [] if any(curve.color for curve in curves) else [mark for curve in curves for mark in curve.published]
    marked = {min(size - 1, max(0, column(x))) for x, _ in published}
    under = "".join(_PUBLISHED if at in marked else " " for at in range(size)).rstrip()
    start, end = f"{first:.10g}", f"{last:.10g}"
    axis = f"{start}{end:>{max(len(end) + 1, size - len(start))}}"
    lines += [f"{' ' * margin}  {line}" for line in (under, axis) if line]
    lines += [f"{_mark(curve, index)} {visible(f'{curve.label}: {curve.last}')}" for index, curve in enumerate(curves)]
    lines += [f"{_SEVERAL} several"] if _SEVERAL in cells.values() else []
    lines += [visible(f"{_PUBLISHED} {curves[0].over} {x:.10g}: {name}") for x, name in published]
    return "\n".join([visible(f"{curves[0].metric} over {curves[0].over}"), *lines])


def _share(value: float, low: float, high: float) -> float:
    """Return the position of a value between ``low`` and ``high``, from 0 to 1; 0 if ``low`` equals ``high``."""
    return (value - low) / ((high - low) or 1.0)


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)


def _mark(curve: Curve, index: int) -> str:
    return click.style(_MARKS[index % len(_MARKS)], fg=_COLORS[curve.color % len(_COLORS)])


def save_picture(curves: Sequence[Curve], output: Path) -> None:
    """Write a picture with one diagram for each metric.

    Raises :class:`ConfigError` if matplotlib is not installed, or if the file cannot be written.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; run: pip install matplotlib") from None
    names = list(dict.fromkeys(curve.metric for curve in curves))
    figure = figures.Figure(figsize=(8, 3 * len(names)), layout="constrained")
    has_runs = any(curve.color for curve in curves)
    for axis, metric in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        for curve in curves:
            if curve.metric == metric:
                _plot(axis, curve, has_runs=has_runs)
        axis.set(xlabel=curves[0].over, ylabel=metric)
        axis.xaxis.get_major_locator().set_params(integer=curves[0].over == STEP)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False, fontsize="small")
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error}") from error


def _plot(axis: Any, curve: Curve, *, has_runs: bool) -> None:
    """Draw one curve with its interval and a mark for each published version, some of which are labelled.

    With several runs, each run has a colour and each algorithm a line style; with one run, each algorithm has a
    colour.
    """
    x, value, low, high = zip(*curve.points, strict=True)
    index, style = (curve.color, _STYLES[curve.style % len(_STYLES)]) if has_runs else (curve.style, "-")
    color = f"C{index}"
    axis.plot(x, value, marker=".", label=curve.label, color=color, linestyle=style)
    if low != high:
        axis.fill_between(x, low, high, color=color, alpha=0.2)
    across = axis.get_xaxis_transform()
    for place, _ in curve.published:
        axis.plot([place], [0.0], transform=across, marker="^", markersize=4, color=color, clip_on=False)
    for place, name in curve.published[:: -max(1, math.ceil(len(curve.published) / LABELLED))]:
        axis.axvline(place, color=color, linestyle=":", linewidth=1)
        shown = name if len(name) <= 40 else f"…{name[-39:]}"
        side = "right" if index % 2 == 0 else "left"
        axis.text(place, 0.04, shown, transform=across, rotation=90, fontsize=6, va="bottom", ha=side, color=color)
