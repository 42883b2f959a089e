"""Prints the output of commands: tables on a terminal, plain aligned lines elsewhere, JSON for programs."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from agl.schemas import to_json

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
"""Adds the option ``--json`` to a command, as its argument ``as_json``."""


def print_json(value: Any) -> None:
    """Print ``value`` as one line of JSON."""
    click.echo(to_json(value).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under column names."""
    if sys.stdout.isatty():
        _print_rich(columns, rows)
    else:
        widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
        for row in (columns, *rows):
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def when(unix_s: float) -> str:
    """Format a time for people, in UTC; empty for 0, a time that is not known."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S") if unix_s else ""


def short(value: Any, limit: int = 60) -> str:
    """Format a value on one line of at most ``limit`` characters."""
    text = value if isinstance(value, str) else to_json(value).decode()
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
