"""Curves of metrics, in block characters for a terminal and as a picture."""

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from agl.contracts import Metric
from agl.errors import ConfigError
from agl.schemas import ResourceVersion

STEP = "step"
"""The axis below a curve where no metric is named for it."""

HEIGHT = 10
"""Lines of a curve in the terminal."""

_BLOCKS = " ▁▂▃▄▅▆▇█"


class Point(NamedTuple):
    """A value with its interval, whose ends equal the value where there is none."""

    x: float
    value: float
    low: float
    high: float


class Curve(NamedTuple):
    """A metric of one algorithm, and the versions that the algorithm published on the way."""

    algorithm: str
    metric: str
    over: str
    points: list[Point]
    published: list[tuple[float, str]]

    @property
    def has_interval(self) -> bool:
        """True if any value has an interval."""
        return any(point.low < point.high for point in self.points)


def curves_of(
    found: Sequence[Metric], every: Sequence[Metric], versions: Sequence[ResourceVersion], *, over: str
) -> list[Curve]:
    """Return a curve for each algorithm and metric that has a finite value.

    Args:
        found: The values to draw.
        every: All metrics of the experiment, among which are the ends of intervals and the axis.
        versions: The versions in the store, of all experiments.
        over: The metric on the axis, or :data:`STEP`.
    """
    known = {(m.algorithm, m.step, m.name): m.value for m in every if math.isfinite(m.value)}
    curves: dict[tuple[str, str], list[Point]] = {}
    for metric in found:
        x = float(metric.step) if over == STEP else known.get((metric.algorithm, metric.step, over))
        if x is not None and math.isfinite(metric.value):
            ends = [known.get((metric.algorithm, metric.step, f"{metric.name}_{end}")) for end in ("low", "high")]
            low, high = (metric.value if end is None else end for end in ends)
            curves.setdefault((metric.algorithm, metric.name), []).append(Point(x, metric.value, low, high))
    marks = {algorithm: list(_published(algorithm, every, versions, over=over)) for algorithm, _ in curves}
    return [Curve(algorithm, name, over, points, marks[algorithm]) for (algorithm, name), points in curves.items()]


def _published(
    algorithm: str, every: Sequence[Metric], versions: Sequence[ResourceVersion], *, over: str
) -> Iterator[tuple[float, str]]:
    """Yield where an algorithm of this experiment published versions, and their names."""
    places = {m.step: m.value if over != STEP else m.step for m in every
              if m.algorithm == algorithm and over in (STEP, m.name)}  # fmt: skip
    prefix = f"{every[0].experiment}-"
    for version in versions:
        is_own = version.algorithm == algorithm and version.version.startswith(prefix)
        if is_own and version.step in places and not version.metadata.get("candidate"):
            yield float(places[version.step]), f"{version.name}@{version.version}"


def drawn(curve: Curve, *, width: int) -> str:
    """Draw a curve in block characters, with its bounds on the left, the axis and the published versions below.

    Of an interval the part below the value is drawn as ``▓`` and the part above it as ``░``.
    """
    last = curve.points[-1]
    low, high = min(point.low for point in curve.points), max(point.high for point in curve.points)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    axis = _Axis(curve, width=max(8, width - margin - 3))
    columns = axis.columns()
    lines = [
        f"{label:>{margin}} ┤{''.join(_cell(point, HEIGHT - 1 - row, low, high) for point in columns)}"
        for row, label in enumerate(labels)
    ]
    marks = [" "] * len(columns)
    for x, _ in curve.published:
        marks[axis.column(x)] = "▲"
    first, end = f"{curve.points[0].x:.10g}", f"{last.x:.10g}"
    below = f"{' ' * margin}  {first}{end:>{max(len(end) + 1, len(columns) - len(first))}}"
    under = [f"{' ' * margin}  {''.join(marks).rstrip()}"] if curve.published else []
    interval = f" [{last.low:.4g}, {last.high:.4g}]" if last.low < last.high else ""
    head = f"{curve.algorithm} {curve.metric}: {last.value:.4g}{interval} at {curve.over} {end}"
    named = [f"▲ {curve.over} {x:.10g}: {name}" for x, name in curve.published]
    return "\n".join([head, *lines, *under, below, *named])


class _Axis:
    """Places points in columns; the last column has as much room as one value takes on average."""

    def __init__(self, curve: Curve, *, width: int) -> None:
        self._points = curve.points
        self._first, last = curve.points[0].x, curve.points[-1].x
        unit = 1.0 if curve.over == STEP else (last - self._first) / max(1, len(curve.points) - 1) or 1.0
        self._span = last - self._first + unit
        self._width = min(width, round(4 * self._span / unit))

    def column(self, x: float) -> int:
        """Return the column of a place on the axis; places beyond its ends are in the first or last one."""
        return max(0, min(self._width - 1, int((x - self._first) * self._width / self._span)))

    def columns(self) -> list[Point]:
        """Return the mean of each column's points, or the last one before where it has none."""
        found: dict[int, list[Point]] = {}
        for point in self._points:
            found.setdefault(self.column(point.x), []).append(point)
        columns: list[Point] = []
        for column in range(self._width):
            here = found.get(column, columns[-1:])
            columns.append(Point(*(sum(values) / len(here) for values in zip(*here, strict=True))))
        return columns


def _cell(point: Point, row: int, low: float, high: float) -> str:
    """Return the character of a column in a row, counted from below."""

    def level(value: float) -> int:
        return 1 + round((value - low) / ((high - low) or 1.0) * (8 * HEIGHT - 1)) - 8 * row

    if point.low == point.high:
        return _BLOCKS[max(0, min(8, level(point.value)))]
    # An interval is drawn in whole cells: a cell belongs to what its middle lies in.
    parts = ((level(point.low), "█"), (level(point.value), "▓"), (level(point.high), "░"))
    return next((character for top, character in parts if top >= 4), " ")


def save_picture(curves: Sequence[Curve], output: Path) -> None:
    """Write a picture with all curves, those of one metric in one diagram; raises :class:`ConfigError`."""
    try:
        figures: Any = import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; run: pip install matplotlib") from None
    names = list(dict.fromkeys(curve.metric for curve in curves))
    figure = figures.Figure(figsize=(8, 3 * len(names)), layout="constrained")
    for axis, metric in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        for curve in curves:
            if curve.metric == metric:
                _plot(axis, curve)
        axis.set(xlabel=curves[0].over, ylabel=metric)
        axis.xaxis.get_major_locator().set_params(integer=curves[0].over == STEP)
        axis.grid(alpha=0.3)
        axis.legend()
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error}") from error


def _plot(axis: Any, curve: Curve) -> None:
    """Draw one curve with its interval, and a dotted line for every published version."""
    x, value, low, high = zip(*curve.points, strict=True)
    line = axis.plot(x, value, marker=".", label=curve.algorithm)[0]
    if curve.has_interval:
        axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
    for place, name in curve.published:
        axis.axvline(place, color=line.get_color(), linestyle=":", linewidth=1)
        where = (place, axis.get_ylim()[0])
        axis.annotate(name, where, rotation=90, fontsize=6, va="bottom", ha="right")
