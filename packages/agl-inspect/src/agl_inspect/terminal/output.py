"""Prints the output of commands: JSON for programs, and tables, which are cut to fit a terminal."""

import shutil
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from typing import Any

import click

from agl.schemas import to_json
from agl_inspect.text import CONTROLS, visible

_STDOUT = "agl_inspect.stdout"


def _keep_stdout(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Keep standard output for the JSON alone: what plugins and agents print goes to standard error."""
    if value:
        ctx.meta[_STDOUT] = sys.stdout
        ctx.with_resource(redirect_stdout(sys.stderr))
    return value


json_option = click.option("--json", "as_json", is_flag=True, callback=_keep_stdout, help="Print JSON for programs.")
"""Decorator that adds ``--json`` to a command, which gets the flag as ``as_json``."""


STOPPED = 130
"""Exit status after an interrupt, by the shells' convention."""

_IN_JSON = {code: f"\\u{code:04x}" for code in CONTROLS}

_IN_CELLS = {ord("\n"): r"\n", ord("\t"): r"\t"}
"""Escapes for line feed and tab, which a text may contain but a row of a table may not."""

_LEAST = 6
"""The least width of a shortened column in characters."""


def echo(text: str) -> None:
    """Print text with its control characters escaped."""
    click.echo(visible(text))


def print_json(value: Any) -> None:
    """Print ``value`` as one line of JSON."""
    write_json(json_line(value) + "\n")


def write_json(text: str) -> None:
    """Write a part of the JSON output to standard output, which ``--json`` keeps free of other text."""
    context = click.get_current_context(silent=True)
    click.echo(text, file=context and context.meta.get(_STDOUT), nl=False)


def json_line(value: Any) -> str:
    """Return ``value`` as one line of JSON, with control characters escaped."""
    return to_json(value).decode().translate(_IN_JSON)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Sequence[str] = (), least: Sequence[str] = ()
) -> None:
    """Print rows under column names, each row on one line.

    On a terminal that is too narrow, columns are shortened; if that is not enough, columns are left out, and a
    note names them.

    Args:
        columns: The names of the columns.
        rows: The cells of each row.
        whole: Columns that are never shortened or left out, such as ids. The first column is always whole.
        least: Columns to leave out first, in this order; the others follow, the last column first.
    """
    cells = [[visible(cell).translate(_IN_CELLS) for cell in row] for row in (columns, *rows)]
    if not sys.stdout.isatty():
        _print_aligned(cells, [max(map(len, column)) for column in zip(*cells, strict=True)])
        return
    fixed = {0, *(columns.index(name) for name in whole)}
    order = [columns.index(name) for name in least]
    order += [index for index in reversed(range(len(columns))) if index not in order]
    _print_fitted(cells, fixed, [index for index in order if index not in fixed])


def when(unix_s: float) -> str:
    """Format Unix seconds as date and time in UTC.

    0 means unknown and gives ``""``; a time that is out of range is returned as a number.
    """
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S") if unix_s else ""
    except (OSError, OverflowError, ValueError):  # such as nanoseconds that another program wrote
        return f"{unix_s:g}"


def _print_aligned(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_fitted(cells: Sequence[Sequence[str]], fixed: Collection[int], order: Sequence[int]) -> None:
    """Print the columns that fit the terminal, and name the columns left out on standard error."""
    from rich.cells import cell_len

    natural = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    room = shutil.get_terminal_size().columns
    left_out = 0
    while (widths := _widths(natural, fixed, order[left_out:], room)) is None and left_out < len(order):
        left_out += 1
    shown = widths or {index: natural[index] for index in sorted(fixed)}
    for number, row in enumerate(cells):
        line = "  ".join(_fitted(row[index], width) for index, width in shown.items()).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)
    if left_out:
        names = ", ".join(cells[0][index] for index in sorted(order[:left_out]))
        click.echo(f"(no room for {names}: widen the terminal, or use --json)", err=True)


def _widths(natural: Sequence[int], fixed: Collection[int], others: Sequence[int], room: int) -> dict[int, int] | None:
    """Return the width of each column after the widest were shortened; ``None`` if even this does not fit ``room``."""
    widths = {index: natural[index] for index in sorted({*fixed, *others})}
    excess = sum(widths.values()) + 2 * (len(widths) - 1) - room
    for _ in range(excess):
        longest = max(others, key=lambda index: widths[index], default=-1)
        if longest < 0 or widths[longest] <= _LEAST:
            return None
        widths[longest] -= 1
    return widths


def _fitted(cell: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(cell, width) if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
