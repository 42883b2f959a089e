"""Draws curves of several runs over each other in a terminal, a mark for each curve and a colour for each run."""

import math
from collections.abc import Sequence

import click

from agl_inspect.cli.curves import STEP, Curve, share
from agl_inspect.statistics.means import mean
from agl_inspect.text import visible

HEIGHT = 14
"""Lines of the diagram."""

_MARKS = "●○▲△■□◆◇"
_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
_SEVERAL = "+"


def overlaid(curves: Sequence[Curve], *, width: int) -> str:
    """Draw curves of one metric on common axes, with a legend of their last values.

    A column of the diagram has the mean of a curve's values in it; a place that several curves share has a plus sign.
    Every line of the diagram fits ``width``. Colours are escape sequences, which :func:`click.echo` leaves out where
    the output is no terminal.
    """
    values = [point.value for curve in curves for point in curve.points]
    low, high = min(values), max(values)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    places = [point.x for curve in curves for point in curve.points]
    first, last = min(places), max(places)
    size = max(8, width - margin - 3)
    if curves[0].over == STEP:
        size = min(size, 1 + 4 * round(last - first))
    cells: dict[tuple[int, int], list[int]] = {}
    for index, curve in enumerate(curves):
        for column, value in _columns(curve, first, last, size).items():
            row = HEIGHT - 1 - _nearest(share(value, low, high) * (HEIGHT - 1))
            cells.setdefault((row, column), []).append(index)
    lines = [
        f"{label:>{margin}} ┤{''.join(_mark(curves, cells.get((row, column), [])) for column in range(size)).rstrip()}"
        for row, label in enumerate(labels)
    ]
    ends = f"{first:.10g}", f"{last:.10g}"
    below = f"{' ' * margin}  {ends[0]}{ends[1]:>{max(len(ends[1]) + 1, size - len(ends[0]))}}"
    head = f"{curves[0].metric} over {curves[0].over}"
    legend = [_legend(curves, index) for index in range(len(curves))]
    if any(len(here) > 1 for here in cells.values()):
        legend.append(f"{_SEVERAL} several")
    return "\n".join([visible(head), *lines, below, *legend])


def _columns(curve: Curve, first: float, last: float, size: int) -> dict[int, float]:
    """Return the mean of the curve's values in each column that has any."""
    found: dict[int, list[float]] = {}
    for point in curve.points:
        found.setdefault(_nearest((point.x - first) / ((last - first) or 1.0) * (size - 1)), []).append(point.value)
    return {column: mean(values) for column, values in found.items()}


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)


def _mark(curves: Sequence[Curve], here: Sequence[int]) -> str:
    if len(here) != 1:
        return _SEVERAL if here else " "
    return click.style(_MARKS[here[0] % len(_MARKS)], fg=_COLORS[curves[here[0]].color % len(_COLORS)])


def _legend(curves: Sequence[Curve], index: int) -> str:
    curve, last = curves[index], curves[index].points[-1]
    interval = f" [{last.low:.4g}, {last.high:.4g}]" if last.low < last.high else ""
    text = f"{curve.label}: {last.value:.4g}{interval} at {curve.over} {last.x:.10g}"
    return f"{_mark(curves, [index])} {visible(text)}"
