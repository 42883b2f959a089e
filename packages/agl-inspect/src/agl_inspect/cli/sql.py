"""``agl sql``: runs a query over everything that is recorded, in tables of plain columns.

The rows are read through the store's contract, so that the command works with every store, and copied into a temporary
SQLite database. Only the tables that the query names are copied.
"""

import csv
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import click

from agl.contracts import Metric, Recording, RolloutQuery, Store
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.schemas import Episode, Json, to_json
from agl.stores import read_recordings
from agl_inspect.records.names import run_of
from agl_inspect.rollouts.explanations import cached_tokens_of, tokens_of
from agl_inspect.terminal.opening import (
    Reading,
    complete_experiment,
    reads_store,
)
from agl_inspect.terminal.output import echo, print_json, print_table
from agl_inspect.terminal.query import deciding

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_PROGRESS_EVERY = 1000

_Found = tuple[list[str], list[tuple[Any, ...]]]
"""The names of a query's columns, and the rows."""


@click.command()
@click.argument("query", required=False)
@click.option("--experiment", shell_complete=complete_experiment, help="Only rows of this experiment.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV for spreadsheets.")
@reads_store
def sql(store: Reading, query: str | None, experiment: str | None, as_csv: bool) -> None:
    """Run QUERY, a SELECT statement in SQLite's dialect, over the records; without it, list the tables and columns.

    It works with any store: the tables that the query names are first copied into a temporary database.
    """
    if query is None:
        for table, columns in TABLES.items():
            echo(f"{table}: {', '.join(columns)}")
        return
    columns, rows = store.read(lambda opened: _ask(opened, query, experiment))
    if store.as_json:
        _refuse_repeated(columns)
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    else:
        print_table(columns, [[_shown(value) for value in row] for row in rows])


async def _ask(store: Store, query: str, experiment: str | None) -> _Found:
    with closing(sqlite3.connect("")) as database:  # a temporary file, which SQLite removes
        make_tables(database)
        tables = _tables_of(database, query)
        await fill_tables(database, store, tables=tables, experiment=experiment, progress=_tell)
        database.set_authorizer(_only_reading)
        return _run(database, query)


def _tables_of(database: sqlite3.Connection, query: str) -> set[str]:
    """Return the tables that a query reads; raises :class:`ConfigError` if the query is wrong or changes something."""
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
        rows = cursor.fetchall()  # inside the try, because any row may be the first one with an error
    except (sqlite3.Error, sqlite3.Warning) as error:
        fault = "it does more than read" if str(error) == "not authorized" else str(error).rstrip(".")
        raise ConfigError(
            f"the query cannot be run: {fault}; write one SELECT over {', '.join(TABLES)} (agl sql lists their columns)"
        ) from error
    return [column[0] for column in cursor.description or ()], rows


def _refuse_repeated(columns: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if columns have the same name, because a JSON object keeps only the last of them."""
    repeated = [name for name, count in Counter(columns).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"several columns are called {', '.join(repeated)}, and JSON would keep one of each; select the columns "
            "that you need, each under its own name (AS), or use --csv"
        )


def _tell(count: int) -> None:
    if count % _PROGRESS_EVERY == 0 and sys.stderr.isatty():
        click.echo(f"rollouts read: {count:,}", err=True)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


TABLES: dict[str, tuple[str, ...]] = {
    "rollouts": (
        *("rollout_id TEXT", "experiment TEXT", "run INTEGER", "algorithm TEXT", "step INTEGER", "mode TEXT"),
        *("status TEXT", "group_id TEXT", "reward REAL", "calls INTEGER", "prompt_tokens INTEGER"),
        *("response_tokens INTEGER", "cached_tokens INTEGER", "attempts INTEGER", "failures INTEGER"),
        *("losses INTEGER", "created_at REAL", "started_at REAL", "finished_at REAL", "task TEXT"),
        *("metadata TEXT", "resources TEXT"),
    ),
    "attempts": (
        *("attempt_id TEXT", "rollout_id TEXT", "number INTEGER", "status TEXT", "worker TEXT", "started_at REAL"),
        *("finished_at REAL", "error_type TEXT", "error TEXT"),
    ),
    "calls": (
        *("rollout_id TEXT", "attempt_id TEXT", "span_id TEXT", "agent TEXT", "turn INTEGER", "policy TEXT"),
        *("model TEXT", "model_version TEXT", "dialect TEXT", "prompt_tokens INTEGER", "response_tokens INTEGER"),
        *(
            "cached_tokens INTEGER",
            "finish_reason TEXT",
            "status_code INTEGER",
            "started_at REAL",
            "latency_s REAL",
            "reject TEXT",
        ),
        *("error TEXT", "request TEXT", "response TEXT"),
    ),
    "rewards": (
        *("rollout_id TEXT", "attempt_id TEXT", "span_id TEXT", "name TEXT", "value REAL", "source TEXT"),
        *("scope TEXT", "feedback TEXT"),
    ),
    "metrics": (
        *("experiment TEXT", "run INTEGER", "algorithm TEXT", "step INTEGER", "experiment_step INTEGER", "name TEXT"),
        *("value REAL", "time REAL"),
    ),
}
"""The columns of each table, with SQLite's types. Times are Unix seconds; structured values such as tasks are JSON."""

Row = tuple[Any, ...]


def make_tables(database: sqlite3.Connection) -> None:
    """Make the tables, without rows."""
    for table, columns in TABLES.items():
        database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")


async def fill_tables(
    database: sqlite3.Connection,
    store: Store,
    *,
    tables: Collection[str],
    experiment: str | None,
    progress: Callable[[int], None],
) -> None:
    """Copy rows into ``tables``.

    Args:
        database: The database, with the tables of :func:`make_tables`.
        store: The store to read.
        tables: The names of the tables to fill.
        experiment: Only rows of this experiment; ``None`` for all.
        progress: Called after each rollout with the number of rollouts so far.
    """
    if "metrics" in tables:
        names = [experiment] if experiment else [record.name for record in await store.experiments()]
        for name in names:
            found = await store.metrics(name)
            _insert(database, "metrics", map(_metric, found))
    if not _OF_ROLLOUTS & {*tables}:
        return
    spans = "all" if _OF_SPANS & {*tables} else "none"
    count = 0
    async for recording in read_recordings(store, RolloutQuery(experiment=experiment), spans=spans):
        _fill(database, recording, tables)
        progress(count := count + 1)


def _fill(database: sqlite3.Connection, recording: Recording, tables: Collection[str]) -> None:
    for table in _OF_ROLLOUTS & {*tables}:
        _insert(database, table, _ROWS[table](recording))


def _insert(database: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    marks = ", ".join("?" * len(TABLES[table]))
    database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def _episode(recording: Recording) -> Episode:
    attempt = deciding(recording.rollout, recording.attempts)
    return build_episode(recording.rollout, attempt, recording.spans)


def _metric(metric: Metric) -> Row:
    return (
        *(metric.experiment, metric.run, metric.algorithm, metric.step, metric.experiment_step, metric.name),
        *(metric.value, metric.time),
    )


def _rollout(recording: Recording) -> Iterator[Row]:
    rollout = recording.rollout
    own = [span for span in recording.spans if span.call is not None and span.attempt_id == rollout.attempt_id]
    tokens = [sum(counts) for counts in zip(*map(tokens_of, own), strict=True)] or [0, 0]
    yield (
        *(rollout.rollout_id, rollout.experiment, run_of(rollout)),
        *(_cell(rollout.metadata.get("algorithm")), _cell(rollout.metadata.get("step"))),
        *(rollout.mode, rollout.status, rollout.group_id, _episode(recording).reward, len(own), *tokens),
        *(sum(map(cached_tokens_of, own)), rollout.attempts, rollout.failures, rollout.losses),
        *(_time(rollout.created_at), _time(rollout.started_at), _time(rollout.finished_at)),
        *(_json(rollout.task), _json(rollout.metadata), _json(rollout.resources)),
    )


def _attempts(recording: Recording) -> Iterator[Row]:
    for attempt in recording.attempts:
        yield (
            *(attempt.attempt_id, attempt.rollout_id, attempt.number, attempt.status, attempt.worker),
            *(_time(attempt.started_at), _time(attempt.finished_at)),
            *((attempt.error.type, attempt.error.message) if attempt.error else (None, None)),
        )


def _calls(recording: Recording) -> Iterator[Row]:
    known = {(call.attempt_id, call.span_id): call for call in _episode(recording).transitions}
    for span in recording.spans:
        if (call := span.call) is not None:
            seen = known.get((span.attempt_id, span.span_id))
            yield (
                *(span.rollout_id, span.attempt_id, span.span_id),
                *((seen.agent, seen.turn) if seen else (None, None)),
                *(call.policy, call.model, call.model_version, call.dialect, *tokens_of(span)),
                *(
                    cached_tokens_of(span),
                    call.finish_reason,
                    call.status_code,
                    _time(span.start_ns / 1e9),
                    call.latency_s,
                ),
                *(seen.reject if seen else None, call.error, _json(call.request), _json(call.response)),
            )


def _rewards(recording: Recording) -> Iterator[Row]:
    for span in recording.spans:
        if (reward := span.reward) is not None:
            about = (reward.name, reward.value, reward.source, reward.scope, reward.feedback)
            yield (span.rollout_id, span.attempt_id, span.span_id, *about)


def _time(unix_s: float) -> float | None:
    return unix_s or None


def _cell(value: Json) -> str | int | float | None:
    """Convert a value of metadata for SQLite; a value whose type SQLite lacks becomes JSON text."""
    is_kept = value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)
    return value if is_kept else _json(value)


def _json(value: Json) -> str:
    return to_json(value).decode()


_ROWS: dict[str, Callable[[Recording], Iterable[Row]]] = {
    "rollouts": _rollout,
    "attempts": _attempts,
    "calls": _calls,
    "rewards": _rewards,
}
_OF_ROLLOUTS = {*_ROWS}
_OF_SPANS = _OF_ROLLOUTS - {"attempts"}
