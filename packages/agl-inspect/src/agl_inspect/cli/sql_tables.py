"""Copies what a store recorded into tables of plain columns, in a temporary SQLite database, for ``agl sql``.

It reads through the store's contract, so it works with every store, and leaves out the tables that nobody asks for.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from agl.contracts import Metric, Recording, RolloutQuery, Store
from agl.episodes import build_episode
from agl.schemas import Episode, Json, to_json
from agl.stores import read_recordings
from agl_inspect.records.rollouts import run_of
from agl_inspect.rollouts.explanations import tokens_of
from agl_inspect.terminal.query import deciding

TABLES: dict[str, tuple[str, ...]] = {
    "rollouts": (
        *("rollout_id TEXT", "experiment TEXT", "run INTEGER", "algorithm TEXT", "step INTEGER", "mode TEXT"),
        *("status TEXT", "group_id TEXT", "reward REAL", "calls INTEGER", "prompt_tokens INTEGER"),
        *("response_tokens INTEGER", "attempts INTEGER", "failures INTEGER", "losses INTEGER", "created_at REAL"),
        *("started_at REAL", "finished_at REAL", "task TEXT", "metadata TEXT"),
    ),
    "attempts": (
        *("attempt_id TEXT", "rollout_id TEXT", "number INTEGER", "status TEXT", "worker TEXT", "started_at REAL"),
        *("finished_at REAL", "error_type TEXT", "error TEXT"),
    ),
    "calls": (
        *("rollout_id TEXT", "attempt_id TEXT", "span_id TEXT", "agent TEXT", "turn INTEGER", "policy TEXT"),
        *("model TEXT", "model_version TEXT", "dialect TEXT", "prompt_tokens INTEGER", "response_tokens INTEGER"),
        *("finish_reason TEXT", "status_code INTEGER", "started_at REAL", "latency_s REAL", "reject TEXT"),
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
"""The columns of each table, with SQLite's types. Times are Unix seconds; tasks, requests and the like are JSON."""

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
        experiment: Only rows of this experiment.
        progress: Called with the number of rollouts so far.
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
        *(rollout.attempts, rollout.failures, rollout.losses),
        *(_time(rollout.created_at), _time(rollout.started_at), _time(rollout.finished_at)),
        *(_json(rollout.task), _json(rollout.metadata)),
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
                *(call.finish_reason, call.status_code, _time(span.start_ns / 1e9), call.latency_s),
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
    """Return a value of metadata as SQLite keeps it; as JSON what it has no type for."""
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
