"""Draws a run for a terminal: one or two short lines for each algorithm, and one line for validations."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from agl_inspect.records.validations import after_step
from agl_inspect.text import ends, visible
from agl_run.display.run_view import AlgorithmView, RunView, Tally
from agl_run.plan import VALIDATION

if TYPE_CHECKING:
    from rich.text import Text

_LONGEST_NAME = 16
_WIDEST_BAR = 24
_WIDEST_CURVE = 32
_LEAST = 5
"""The least width in columns of a bar or a curve; with less room it is left out."""

_NARROW = 60
"""On terminals with fewer columns, one space separates the parts of a line; on others, two spaces do."""

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*%#"
_ASCII = str.maketrans({"━": "#", "─": "-", "…": ".", **dict(zip(_LEVELS, _ASCII_LEVELS, strict=True))})

Part = tuple[str, str]
"""A piece of a line: its text and its style."""


def draw(view: RunView, *, width: int, height: int, is_ascii: bool = False) -> "list[Text]":
    """Return at most ``height`` lines of at most ``width`` columns each.

    If there is no room for all algorithms, those that wait or are finished are left out first.

    Args:
        view: The run.
        width: Columns of the terminal.
        height: Lines that may be drawn.
        is_ascii: Whether to draw with ASCII characters only.
    """
    parts = [_algorithm(one, view.tallies.get(one.name), width) for one in _shown(view, height)]
    # A copy of the keys: the trainer adds callers while this thread draws.
    others = [name for name in list(view.tallies) if name not in view.algorithms and name != VALIDATION]
    lines = [line for each in parts for line in each]
    lines += [_caller(name, view.tallies[name], width) for name in others if view.tallies[name].asked]
    lines += _validation(view, width)
    return [_text(line, width, is_ascii=is_ascii) for line in lines[: max(0, height)]]


def _shown(view: RunView, height: int) -> list[AlgorithmView]:
    every = list(view.algorithms.values())
    active = [one for one in every if one.has_begun and not one.is_finished]
    # An active algorithm takes two lines, and there is one line for validations.
    return every if len(every) + len(active) < height else active


def _algorithm(one: AlgorithmView, tally: Tally | None, width: int) -> list[list[Part]]:
    is_active = one.has_begun and not one.is_finished
    head: list[Part] = [(_name(one.name), "bold" if is_active else "dim")]
    steps = f"{one.step}/{one.total}" if one.total else f"step {one.step}"
    tail: list[Part] = [(steps, "")]
    if one.reward is not None:
        tail.append((f"{one.reward:.3f}", "green"))
        tail += [(text.strip(), "dim")] if (text := ends(*one.ends)) else []
    elif not one.has_begun:
        tail.append(("finished" if one.is_finished else "waits", "dim"))
    # The least important part is last, and is dropped first.
    while len(tail) > 1 and _columns([*head, *tail], width) > width:
        tail.pop()
    gap = len(_gap(width))
    room = width - _columns([*head, *tail], width) - gap
    if one.total and room >= _LEAST:
        # The other half is for the curve.
        bar = min(_WIDEST_BAR, max(_LEAST, room // 2))
        head += _bar(one.step, one.total, bar)
        room -= bar + gap
    if len(one.rewards) > 1 and room >= _LEAST:
        tail.append((_curve(list(one.rewards), min(_WIDEST_CURVE, room)), "cyan"))
    doing = _doing(one, tally) if is_active else []
    return [[*head, *tail], *([[("", ""), *doing]] if doing else [])]


def _doing(one: AlgorithmView, tally: Tally | None) -> list[Part]:
    work: list[Part] = []
    if one.work is not None:
        done, total, text = one.work
        work = [(f"{visible(text)} {done}/{total}".strip(), "")] if total else []
    return work + _counts(tally) + ([(one.left, "dim")] if one.left else [])


def _counts(tally: Tally | None) -> list[Part]:
    """Return pieces of a line: progress, rate, queued and running rollouts of open requests, and all failed ones."""
    if tally is None:
        return []
    parts: list[Part] = []
    if tally.done < tally.asked:
        rate = tally.per_second()
        parts = [(f"{tally.done}/{tally.asked}", ""), *([(_rate(rate), "")] if rate else [])]
        parts += [(f"{tally.queued} queued", "dim"), (f"{tally.running} running", "")]
    return parts + ([(f"{tally.failed} failed", "red")] if tally.failed else [])


def _caller(name: str, tally: Tally, width: int) -> list[Part]:
    """Return the line for a caller that is not an algorithm: its name, a bar and the counts of its rollouts."""
    bar = min(_WIDEST_BAR, max(_LEAST, width // 4))
    return [(_name(name), "bold"), *_bar(tally.done, tally.asked, bar), *_counts(tally)]


def _validation(view: RunView, width: int) -> list[list[Part]]:
    tally = view.tallies.get(VALIDATION)
    if tally is not None and tally.done < tally.asked:
        return [_caller(VALIDATION, tally, width)]
    if view.validation is None or view.best is None:
        return []
    line: list[Part] = [(VALIDATION, "bold"), (f"{view.validation[1]:.3f}", "green")]
    return [[*line, (f"best {view.best[1]:.3f} {after_step(view.best[0])}", "dim")]]


def _bar(done: int, total: int, width: int) -> list[Part]:
    full = min(width, done * width // max(1, total))
    return [("━" * full + "─" * (width - full), "cyan")]


def _curve(values: Sequence[float], width: int) -> str:
    """Draw values as block characters, scaled from lowest to highest; if necessary, average neighbours."""
    count = min(width, len(values))
    # Integer arithmetic spreads the remainder, so that neighbours differ by one value at most.
    ends = [len(values) * place // count for place in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    # A flat curve is drawn at the bottom.
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] for mean in means)


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{60 * per_second:.0f}/min"


def _name(name: str) -> str:
    shown = " ".join(visible(name).split())
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…"


def _gap(width: int) -> str:
    return " " if width < _NARROW else "  "


def _columns(parts: Sequence[Part], width: int) -> int:
    from rich.cells import cell_len

    return sum(cell_len(text) for text, _ in parts) + len(_gap(width)) * (len(parts) - 1)


def _text(parts: list[Part], width: int, *, is_ascii: bool) -> "Text":
    """Join as many leading parts as fit into ``width``; if even the first one is too wide, it is truncated."""
    from rich.text import Text

    while len(parts) > 1 and _columns(parts, width) > width:
        parts.pop()
    pieces = [(text.translate(_ASCII) if is_ascii else text, style) for text, style in parts]
    text = Text(_gap(width)).join(Text(piece, style=style) for piece, style in pieces)
    text.truncate(width)
    return text
