"""Copies what a store recorded into tables of plain columns, in a temporary SQLite database, for ``agl sql``.

It reads through the store's contract, so it works with every store, and leaves out the tables that nobody asks for.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from agl import semconv
from agl.contracts import Recording, RolloutQuery, Store
from agl.episodes import build_episode
from agl.schemas import Attempt, Episode, Json, Span, to_json
from agl.stores import read_recordings
from agl_run.cli.query import deciding

TABLES: dict[str, tuple[str, ...]] = {
    "rollouts": (
        *("rollout_id TEXT", "experiment TEXT", "algorithm TEXT", "step INTEGER", "mode TEXT", "status TEXT"),
        *("group_id TEXT", "reward REAL", "calls INTEGER", "prompt_tokens INTEGER", "response_tokens INTEGER"),
        *("attempts INTEGER", "failures INTEGER", "losses INTEGER", "created_at REAL", "started_at REAL"),
        *("finished_at REAL", "task TEXT", "metadata TEXT"),
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
    "metrics": ("experiment TEXT", "algorithm TEXT", "step INTEGER", "name TEXT", "value REAL", "time REAL"),
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
            _insert(database, "metrics", [(m.experiment, m.algorithm, m.step, m.name, m.value, m.time) for m in found])
    if not {"rollouts", "attempts", "calls", "rewards"} & {*tables}:
        return
    count = 0
    async for recording in read_recordings(store, RolloutQuery(experiment=experiment), spans="all"):
        _fill(database, recording, tables)
        progress(count := count + 1)


def _fill(database: sqlite3.Connection, recording: Recording, tables: Collection[str]) -> None:
    episode = build_episode(recording.rollout, deciding(recording.rollout, recording.attempts), recording.spans)
    rows: dict[str, Callable[[], Iterable[Row]]] = {
        "rollouts": lambda: [_rollout(episode, recording.spans)],
        "attempts": lambda: map(_attempt, recording.attempts),
        "calls": lambda: _calls(episode, recording.spans),
        "rewards": lambda: _rewards(recording.spans),
    }
    for table in tables:
        if table in rows:
            _insert(database, table, rows[table]())


def _insert(database: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    marks = ", ".join("?" * len(TABLES[table]))
    database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def _rollout(episode: Episode, spans: Sequence[Span]) -> Row:
    rollout = episode.rollout
    own = [span for span in spans if span.call is not None and span.attempt_id == rollout.attempt_id]
    tokens = [sum(counts) for counts in zip(*map(_token_counts, own), strict=True)] or [0, 0]
    return (
        *(rollout.rollout_id, rollout.experiment, rollout.metadata.get("algorithm"), rollout.metadata.get("step")),
        *(rollout.mode, rollout.status, rollout.group_id, episode.reward, len(own), *tokens),
        *(rollout.attempts, rollout.failures, rollout.losses),
        *(_time(rollout.created_at), _time(rollout.started_at), _time(rollout.finished_at)),
        *(_json(rollout.task), _json(rollout.metadata)),
    )


def _attempt(attempt: Attempt) -> Row:
    error = attempt.error
    return (
        *(attempt.attempt_id, attempt.rollout_id, attempt.number, attempt.status, attempt.worker),
        *(_time(attempt.started_at), _time(attempt.finished_at)),
        *((error.type, error.message) if error else (None, None)),
    )


def _calls(episode: Episode, spans: Sequence[Span]) -> Iterator[Row]:
    known = {(call.attempt_id, call.span_id): call for call in episode.transitions}
    for span in spans:
        if (call := span.call) is not None:
            seen = known.get((span.attempt_id, span.span_id))
            yield (
                *(span.rollout_id, span.attempt_id, span.span_id),
                *((seen.agent, seen.turn) if seen else (None, None)),
                *(call.policy, call.model, call.model_version, call.dialect, *_token_counts(span)),
                *(call.finish_reason, call.status_code, _time(span.start_ns / 1e9), call.latency_s),
                *(seen.reject if seen else None, call.error, _json(call.request), _json(call.response)),
            )


def _rewards(spans: Sequence[Span]) -> Iterator[Row]:
    for span in spans:
        if (reward := span.reward) is not None:
            about = (reward.name, reward.value, reward.source, reward.scope, reward.feedback)
            yield (span.rollout_id, span.attempt_id, span.span_id, *about)


def _token_counts(span: Span) -> tuple[int, int]:
    """Tokens of a call's prompt and response: those of its ids, or else those that the backend counted."""
    ids = (span.call.prompt_len, span.call.response_len) if span.call else (0, 0)
    said = (span.attributes.get(name) for name in (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS))
    prompt, response = (own or (other if isinstance(other, int) else 0) for own, other in zip(ids, said, strict=True))
    return prompt, response


def _time(unix_s: float) -> float | None:
    return unix_s or None


def _json(value: Json) -> str:
    return to_json(value).decode()
