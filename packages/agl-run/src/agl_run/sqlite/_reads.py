"""What the SQLite store reads outside of the writer's thread, each function within one read transaction."""

import heapq
import math
import sqlite3
import sys
from collections.abc import Iterator
from itertools import islice, product
from typing import Any, get_args

from msgspec.structs import replace

from agl.contracts import Change, Metric, RolloutQuery
from agl.errors import NotFoundError
from agl.schemas import (
    TERMINAL_ROLLOUT,
    Attempt,
    Mode,
    ResourceVersion,
    Rollout,
    RolloutStatus,
    Span,
    attempt_id_of,
    decode,
    rollout_id_of,
)
from agl.stores import (
    ATTEMPT_BITS,
    MAX_SEQUENCE,
    NUMBER_MASK,
    ROLLOUT,
    Unpacker,
    engine,
    number_of,
    read_rollout,
    rules,
)
from agl_run.sqlite._tables import span_range

MODES: tuple[Mode, ...] = get_args(Mode)
STATUSES: tuple[RolloutStatus, ...] = get_args(RolloutStatus)


def changes(db: sqlite3.Connection, after: int, limit: int) -> list[Change]:
    """See :meth:`agl.contracts.Store.changes`."""
    rows = db.execute(
        "SELECT c.cursor, c.kind, c.status, c.name, c.attempt, r.rollout_id, r.experiment FROM changes c "
        f"LEFT JOIN rollouts r ON r.seq = c.attempt >> {ATTEMPT_BITS} WHERE cursor > ? AND kind <> 'gone' "
        "ORDER BY cursor LIMIT ?",
        (after, limit),
    )
    return [_change(row) for row in rows]


def _change(row: tuple[Any, ...]) -> Change:
    cursor, kind, status, name, attempt, rollout_id, experiment = row
    if kind == "resource":
        return Change(cursor=cursor, kind=kind, key=name, status=status)
    number = attempt & NUMBER_MASK
    attempt_id = attempt_id_of(rollout_id, number) if number else ""
    return Change(cursor=cursor, kind=kind, key=rollout_id, attempt_id=attempt_id, status=status, experiment=experiment)


def cursor(db: sqlite3.Connection) -> int:
    """The newest change's cursor."""
    return db.execute("SELECT coalesce(max(cursor), 0) FROM changes").fetchone()[0]


def rollouts(db: sqlite3.Connection, query: RolloutQuery) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.rollouts`."""
    if query.ids:
        return rules.select([_need(db, rollout_id) for rollout_id in query.ids], query)
    if query.group_id:
        members = _rows(db, "group_id = ? AND group_id <> ''", (query.group_id,), query)
        wanted = (rollout for rollout in members if rules.is_wanted(rollout, query))
        return list(islice(wanted, query.limit))
    found = heapq.merge(*_ranges(db, query), key=lambda rollout: rollout.rollout_id, reverse=query.is_newest_first)
    wanted = (rollout for rollout in found if query.group_id is None or not rollout.group_id)
    return list(islice(wanted, query.limit))


def _ranges(db: sqlite3.Connection, query: RolloutQuery) -> Iterator[Iterator[Rollout]]:
    """One sorted stream for each (experiment, mode, stage) that can match, or the whole table in order."""
    if query.experiment is None and query.mode is None and not query.status:
        yield _rows(db, "1", (), query)
        return
    experiments = _experiments(db) if query.experiment is None else [query.experiment]
    modes = MODES if query.mode is None else (query.mode,)
    wanted = set(query.status or STATUSES)
    for key in product(experiments, modes, wanted & TERMINAL_ROLLOUT):
        yield _rows(db, "experiment = ? AND mode = ? AND stage = ?", key, query)
    if "queued" in wanted:
        for key in product(experiments, modes):
            yield _rows(db, "experiment = ? AND mode = ? AND stage = 'open' AND status = 'queued'", key, query)
    if "running" in wanted:
        yield iter(rules.select(_running(db), replace(query, limit=sys.maxsize)))


def _running(db: sqlite3.Connection) -> list[Rollout]:
    """All running rollouts: as many as there are workers."""
    rows = db.execute(
        f"SELECT {ROLLOUT} FROM attempts a JOIN rollouts r ON r.seq = a.id >> {ATTEMPT_BITS} WHERE a.status = 'running'"
    )
    return [read_rollout(row) for row in rows]


def _rows(db: sqlite3.Connection, where: str, values: tuple[Any, ...], query: RolloutQuery) -> Iterator[Rollout]:
    """Rollouts behind ``query.after`` in its direction, read as they are needed."""
    compare, order = ("<", "DESC") if query.is_newest_first else (">", "ASC")
    if query.after:
        where, values = f"{where} AND rollout_id {compare} ?", (*values, query.after)
    rows = db.execute(f"SELECT {ROLLOUT} FROM rollouts r WHERE {where} ORDER BY rollout_id {order}", values)
    return map(read_rollout, rows)


def _experiments(db: sqlite3.Connection) -> list[str]:
    """All experiments, by skipping through the index."""
    rows = db.execute(
        """WITH RECURSIVE names(name) AS (
            SELECT min(experiment) FROM rollouts
            UNION ALL
            SELECT (SELECT min(experiment) FROM rollouts WHERE experiment > name) FROM names WHERE name IS NOT NULL)
        SELECT name FROM names WHERE name IS NOT NULL"""
    )
    return [name for (name,) in rows]


def _need(db: sqlite3.Connection, rollout_id: str) -> Rollout:
    row = db.execute(f"SELECT {ROLLOUT} FROM rollouts r WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFoundError("rollout", rollout_id)
    return read_rollout(row)


def _seq(db: sqlite3.Connection, rollout_id: str) -> tuple[int, int | None]:
    """A rollout's number, and the key of its running or deciding attempt."""
    row = db.execute("SELECT seq, attempt FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFoundError("rollout", rollout_id)
    return row


def attempts(db: sqlite3.Connection, rollout_id: str) -> list[Attempt]:
    """See :meth:`agl.contracts.Store.attempts`."""
    low = _seq(db, rollout_id)[0] << ATTEMPT_BITS
    rows = db.execute("SELECT data FROM attempts WHERE id BETWEEN ? AND ? ORDER BY id", (low, low | NUMBER_MASK))
    return [decode(data, Attempt) for (data,) in rows]


def spans(db: sqlite3.Connection, rollout_id: str, attempt_id: str | None, *, after: int, limit: int) -> list[Span]:
    """See :meth:`agl.contracts.Store.spans`."""
    low, high = span_range(_attempt(db, rollout_id, attempt_id))

    def fetch(sequence: int) -> bytes:
        return db.execute("SELECT data FROM spans WHERE key = ?", (low | sequence,)).fetchone()[0]

    unpacker = Unpacker(fetch)
    first = low + min(after, MAX_SEQUENCE)
    rows = db.execute(
        "SELECT key, data FROM spans WHERE key > ? AND key <= ? ORDER BY key LIMIT ?", (first, high, limit)
    )
    return [unpacker.unpack(data, sequence=key & MAX_SEQUENCE) for key, data in rows]


def _attempt(db: sqlite3.Connection, rollout_id: str, attempt_id: str | None) -> int:
    """The key of the attempt whose spans are meant."""
    seq, current = _seq(db, rollout_id)
    if attempt_id is None:
        return seq << ATTEMPT_BITS if current is None else current
    if attempt_id == "":
        return seq << ATTEMPT_BITS
    key = seq << ATTEMPT_BITS | number_of(attempt_id)
    known = db.execute("SELECT 1 FROM attempts WHERE id = ?", (key,)).fetchone()
    if known is None or rollout_id_of(attempt_id) != rollout_id:
        raise engine.unknown_attempt(rollout_id, attempt_id)
    return key


def resource(db: sqlite3.Connection, name: str, version: str | None) -> ResourceVersion:
    """See :meth:`agl.contracts.Store.resource`."""
    if version is None:
        row = db.execute("SELECT data FROM versions WHERE name = ? ORDER BY seq DESC LIMIT 1", (name,)).fetchone()
    else:
        row = db.execute("SELECT data FROM versions WHERE name = ? AND version = ?", (name, version)).fetchone()
    if row is None:
        raise engine.unknown_resource(name, version)
    return decode(row[0], ResourceVersion)


def resources(db: sqlite3.Connection, name: str | None) -> list[ResourceVersion]:
    """See :meth:`agl.contracts.Store.resources`."""
    if name is not None:
        rows = db.execute("SELECT data FROM versions WHERE name = ? ORDER BY seq", (name,))
    else:
        rows = db.execute(
            """WITH RECURSIVE names(name) AS (
                SELECT min(name) FROM versions
                UNION ALL
                SELECT (SELECT min(name) FROM versions v WHERE v.name > names.name) FROM names WHERE name IS NOT NULL)
            SELECT (SELECT data FROM versions v WHERE v.name = names.name ORDER BY seq DESC LIMIT 1)
            FROM names WHERE name IS NOT NULL"""
        )
    return [decode(data, ResourceVersion) for (data,) in rows]


def states(db: sqlite3.Connection, prefix: str) -> dict[str, bytes]:
    """See :meth:`agl.contracts.Store.load_state`."""
    rows = db.execute("SELECT key, value FROM states WHERE key >= ? ORDER BY key", (prefix,))
    found: dict[str, bytes] = {}
    for key, value in rows:
        if not key.startswith(prefix):
            break
        found[key] = value
    return found


def metrics(db: sqlite3.Connection, experiment: str, name: str | None) -> list[Metric]:
    """See :meth:`agl.contracts.Store.metrics`."""
    where, values = "WHERE experiment = ?", (experiment,)
    if name is not None:
        where, values = f"INDEXED BY metrics_by_name {where} AND name = ?", (experiment, name)
    rows = db.execute(
        f"SELECT algorithm, step, name, value, time FROM metrics {where} ORDER BY algorithm, step, name",
        values,
    )
    return [
        Metric(experiment=experiment, algorithm=algorithm, step=step, name=of, value=_float(value), time=time)
        for algorithm, step, of, value, time in rows
    ]


def _float(value: float | None) -> float:
    """SQLite keeps a NaN as NULL."""
    return math.nan if value is None else value
