"""``agl sql``: a query over everything that is recorded, in tables of plain columns."""

import csv
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl_inspect.cli.sql_tables import TABLES, fill_tables, make_tables
from agl_inspect.terminal.completion import complete_experiment
from agl_inspect.terminal.context import pass_manager
from agl_inspect.terminal.opening import store_option, with_store
from agl_inspect.terminal.output import echo, json_option, print_json, print_table

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_TOLD_EVERY = 1000

_Found = tuple[list[str], list[tuple[Any, ...]]]
"""Names of columns, and rows."""


@click.command()
@click.argument("query", required=False)
@store_option
@click.option("--experiment", shell_complete=complete_experiment, help="Only rows of this experiment.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV for spreadsheets.")
@json_option
@pass_manager
def sql(
    manager: PluginManager,
    query: str | None,
    store_url: str | None,
    experiment: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Run QUERY, a SELECT of SQLite's, over what is recorded; without a query, list the tables and their columns.

    Any store can be asked: the rows are copied into a temporary database, and only the tables that the query names.
    """
    if query is None:
        for table, columns in TABLES.items():
            echo(f"{table}: {', '.join(columns)}")
        return
    columns, rows = with_store(manager, store_url, lambda store: _ask(store, query, experiment))
    if as_json:
        _refuse_repeated(columns)
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    else:
        print_table(columns, [[_cell(value) for value in row] for row in rows])


async def _ask(store: Store, query: str, experiment: str | None) -> _Found:
    with closing(sqlite3.connect("")) as database:  # a temporary file, which SQLite removes
        make_tables(database)
        tables = _tables_of(database, query)
        await fill_tables(database, store, tables=tables, experiment=experiment, progress=_tell)
        database.set_authorizer(_only_reading)
        return _run(database, query)


def _tables_of(database: sqlite3.Connection, query: str) -> set[str]:
    """Return the tables that a query reads; raises :class:`ConfigError` for one that is wrong or changes something."""
    tables: set[str] = set()

    def note(action: int, table: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and table in TABLES:
            tables.add(table)
        return _only_reading(action)

    database.set_authorizer(note)
    _run(database, f"EXPLAIN {query}")
    database.set_authorizer(None)
    return tables


def _only_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY


def _run(database: sqlite3.Connection, query: str) -> _Found:
    try:
        cursor = database.execute(query)
        rows = cursor.fetchall()  # a later row may be the first one with a fault
    except (sqlite3.Error, sqlite3.Warning) as error:
        fault = "it does more than read" if str(error) == "not authorized" else str(error).rstrip(".")
        raise ConfigError(
            f"the query cannot be run: {fault}; write one SELECT over {', '.join(TABLES)} (agl sql lists their columns)"
        ) from error
    return [column[0] for column in cursor.description or ()], rows


def _refuse_repeated(columns: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for columns of one name, of which an object of JSON would keep the last."""
    repeated = [name for name, count in Counter(columns).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"several columns are called {', '.join(repeated)}, and JSON would keep one of each; select the columns "
            "that you need, each with a name of its own (AS), or use --csv"
        )


def _tell(count: int) -> None:
    if count % _TOLD_EVERY == 0 and sys.stderr.isatty():
        click.echo(f"read {count:,} rollouts", err=True)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
