"""Curves of metrics, and their drawing in block characters, one by one."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agl.schemas import ResourceVersion
from agl_inspect.records.metrics import LoggedRun, place_of
from agl_inspect.statistics.means import mean

STEP = "step"
"""The axis below a curve where no metric is named for it: the steps of all algorithms of the experiment together."""

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
    """A metric of one algorithm in one run, and the versions that the algorithm published on the way.

    Attributes:
        label: Names the curve among those that are drawn with it.
        points: By their place on the axis below.
        published: Where each version was published, and its name.
        color: Index of its run; curves of one run have one colour in all diagrams.
        style: Index of its algorithm.
    """

    algorithm: str
    metric: str
    over: str
    points: list[Point]
    published: list[tuple[float, str]]
    label: str
    color: int
    style: int

    @property
    def has_interval(self) -> bool:
        """True if any value has an interval."""
        return any(point.low < point.high for point in self.points)


def curves_of(runs: Sequence[LoggedRun], versions: Sequence[ResourceVersion], *, over: str) -> list[Curve]:
    """Return a curve for each run, algorithm and metric that has a finite value.

    Args:
        runs: The metrics to draw; among every one of a run are the ends of intervals and the axis.
        versions: The versions in the store, of all experiments.
        over: The metric on the axis, or :data:`STEP`.
    """
    algorithms = list(dict.fromkeys(metric.algorithm for each in runs for metric in each.found))
    curves: list[Curve] = []
    for color, each in enumerate(runs):
        for (algorithm, name), points in _points(each, over=over).items():
            curve = Curve(
                algorithm=algorithm,
                metric=name,
                over=over,
                points=points,
                published=list(_published(algorithm, each, versions, over=over)),
                label=" ".join([*_run_words(each, runs), algorithm]),
                color=color,
                style=algorithms.index(algorithm),
            )
            curves.append(curve)
    return curves


def _points(of: LoggedRun, *, over: str) -> dict[tuple[str, str], list[Point]]:
    """Return the points of each algorithm and metric."""
    known = {(m.algorithm, m.step, m.name): m.value for m in of.every if math.isfinite(m.value)}
    points: dict[tuple[str, str], list[Point]] = {}
    for metric in of.found:
        x = float(place_of(metric)) if over == STEP else known.get((metric.algorithm, metric.step, over))
        if x is not None and math.isfinite(metric.value):
            ends = [known.get((metric.algorithm, metric.step, f"{metric.name}_{end}")) for end in ("low", "high")]
            low, high = (metric.value if end is None else end for end in ends)
            points.setdefault((metric.algorithm, metric.name), []).append(Point(x, metric.value, low, high))
    return points


def _run_words(of: LoggedRun, runs: Sequence[LoggedRun]) -> list[str]:
    """Return what tells a run from the others: its experiment, its number, or nothing if it is the only one."""
    is_named = any(other.experiment != of.experiment for other in runs)
    is_numbered = sum(other.experiment == of.experiment for other in runs) > 1
    return [of.experiment] * is_named + [f"run {of.run}"] * is_numbered


def _published(
    algorithm: str, of: LoggedRun, versions: Sequence[ResourceVersion], *, over: str
) -> Iterator[tuple[float, str]]:
    """Yield where an algorithm published versions in a run, and their names."""
    places = {m.step: place_of(m) if over == STEP else m.value for m in of.every
              if m.algorithm == algorithm and over in (STEP, m.name)}  # fmt: skip
    for version in versions:
        name = f"{of.experiment}-{of.run}-{algorithm}-{version.step}"  # the second one of a step ends with .2
        is_own = version.algorithm == algorithm and f"{version.version}.".startswith(f"{name}.")
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


def share(value: float, low: float, high: float) -> float:
    """Return the place of a value between two others, from 0 to 1; 0 where these are equal."""
    return (value / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)  # halves, because a difference may be infinite


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
            columns.append(Point(*(mean(values) for values in zip(*here, strict=True))))
        return columns


def _cell(point: Point, row: int, low: float, high: float) -> str:
    """Return the character of a column in a row, counted from below."""

    def level(value: float) -> int:
        return 1 + round(share(value, low, high) * (8 * HEIGHT - 1)) - 8 * row

    if point.low == point.high:
        return _BLOCKS[max(0, min(8, level(point.value)))]
    # An interval is drawn in whole cells: a cell belongs to what its middle lies in.
    parts = ((level(point.low), "█"), (level(point.value), "▓"), (level(point.high), "░"))
    return next((character for top, character in parts if top >= 4), " ")
