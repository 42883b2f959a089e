"""Draws curves of metrics as a picture."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from agl.errors import ConfigError
from agl_inspect.cli.curves import STEP, Curve

_STYLES = ("-", "--", "-.", ":")

_ROOM = 8.0
"""Width around a label that is free of others of its side, in widths of the label."""


class _Mark(NamedTuple):
    """The line and the label of a published version; labels of one side stand on that side of their lines."""

    place: float
    side: str
    line: Any
    label: Any


def save_picture(curves: Sequence[Curve], output: Path) -> None:
    """Write a picture with all curves, those of one metric in one diagram; raises :class:`ConfigError`."""
    try:
        figures: Any = import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; run: pip install matplotlib") from None
    names = list(dict.fromkeys(curve.metric for curve in curves))
    figure = figures.Figure(figsize=(8, 3 * len(names)), layout="constrained")
    marks: list[list[_Mark]] = []
    for axis, metric in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        drawn = [curve for curve in curves if curve.metric == metric]
        has_runs = any(curve.color for curve in curves)
        marks.append([mark for curve in drawn for mark in _plot(axis, curve, has_runs=has_runs)])
        axis.set(xlabel=curves[0].over, ylabel=metric)
        axis.xaxis.get_major_locator().set_params(integer=curves[0].over == STEP)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False, fontsize="small")
    figure.draw_without_rendering()  # only then the places of texts are known
    for each in marks:
        _thin_out(each)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error}") from error


def _plot(axis: Any, curve: Curve, *, has_runs: bool) -> list[_Mark]:
    """Draw one curve with its interval, and a triangle on the axis, a line and a label for every published version.

    Of several runs each has a colour and each algorithm a style; otherwise each algorithm has a colour.
    """
    x, value, low, high = zip(*curve.points, strict=True)
    index, style = (curve.color, _STYLES[curve.style % len(_STYLES)]) if has_runs else (curve.style, "-")
    color = f"C{index}"
    axis.plot(x, value, marker=".", label=curve.label, color=color, linestyle=style)
    if curve.has_interval:
        axis.fill_between(x, low, high, color=color, alpha=0.2)
    side = "right" if index % 2 == 0 else "left"
    across = axis.get_xaxis_transform()
    how: dict[str, Any] = {"rotation": 90, "fontsize": 6, "va": "bottom", "ha": side, "color": color}
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    marks: list[_Mark] = []
    for place, name in curve.published:
        axis.plot([place], [0.0], transform=across, marker="^", markersize=4, color=color, clip_on=False)
        line = axis.axvline(place, color=color, linestyle=":", linewidth=1)
        label = axis.text(place, 0.04, name, transform=across, bbox=behind, in_layout=False, **how)
        marks.append(_Mark(place, side, line, label))
    return marks


def _thin_out(marks: Sequence[_Mark]) -> None:
    """Shorten labels that are higher than their diagram, and remove lines and labels that crowd newer ones."""
    kept: list[tuple[str, Any]] = []
    for mark in sorted(marks, key=lambda mark: mark.place, reverse=True):
        label = mark.label
        share = 0.9 * label.axes.get_window_extent().height / label.get_window_extent().height
        if share < 1.0:
            text = label.get_text()
            label.set_text(f"…{text[-int(share * len(text)) + 1 :]}")
        box = label.get_window_extent()
        if any(box.expanded(_ROOM if mark.side == side else 1.2, 1.0).overlaps(other) for side, other in kept):
            mark.line.remove()
            label.remove()
        else:
            kept.append((mark.side, box))
