"""Reads of the SQLite store outside of the writer's thread, within one read transaction."""

import heapq
import math
import sqlite3
import sys
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

from msgspec.structs import replace

from agl.contracts import Change, Metric, RolloutQuery, Statistics
from agl.errors import NotFoundError
from agl.schemas import (
    TERMINAL_ROLLOUT,
    Attempt,
    ResourceVersion,
    Rollout,
    Span,
    decode,
    rollout_id_of,
)
from agl.stores import MAX_SEQUENCE, is_wanted, readable, select, sort_key, unknown_attempt
from agl_store_sqlite._acknowledged import last_cursor
from agl_store_sqlite._tables import span_range
from agl_store_sqlite.sql.packing import Unpacker
from agl_store_sqlite.sql.rows import (
    ATTEMPT_BITS,
    MODES,
    NUMBER_MASK,
    ROLLOUT,
    STATUSES,
    by_status,
    conditions,
    containing,
    number_of,
    order_of,
    read_attempt,
    read_change,
    read_rollout,
    read_rollouts,
)
from agl_store_sqlite.sql.statistics import STATISTICS, read_statistics


class SQLiteReads:
    """Implements :class:`agl.stores.Reads` for one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def changes(self, after: int, limit: int) -> list[Change]:
        rows = self._db.execute(
            "SELECT c.cursor, c.kind, c.status, c.name, c.attempt, r.rollout_id, r.experiment FROM changes c "
            f"LEFT JOIN rollouts r ON r.seq = c.attempt >> {ATTEMPT_BITS} WHERE cursor > ? AND kind <> 'gone' "
            "ORDER BY cursor LIMIT ?",
            (after, limit),
        )
        return [read_change(row) for row in rows]

    def cursor(self) -> int:
        return last_cursor(self._db)

    def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        if query.ids:
            return select([self._need(rollout_id) for rollout_id in query.ids], query)
        if query.sort == "status":
            return by_status(self.rollouts, query)
        if query.group_id:
            found = self._rows("group_id = ? AND group_id <> ''", (query.group_id,), query)
        else:
            found = heapq.merge(*self._ranges(query), key=sort_key(query), reverse=query.is_newest_first)
        return list(islice((rollout for rollout in found if is_wanted(rollout, query)), query.limit))

    def count_rollouts(self, query: RolloutQuery) -> int:
        if query.ids:
            return len(self.rollouts(replace(query, after="", limit=len(query.ids))))
        if query.contains:
            return sum(1 for _ in containing(self.rollouts, replace(query, after="")))
        if query.experiment is not None and query.group_id is None:
            return self._summed(query)
        where, values = conditions(query, "?")
        return self._db.execute(f"SELECT count(*) FROM rollouts r WHERE {where}", values).fetchone()[0]

    def _summed(self, query: RolloutQuery) -> int:
        """Count the rollouts that match a query: finished ones from the statistics, unfinished ones row by row."""
        finished = [status for status in ("succeeded", "failed", "cancelled") if status in (query.status or STATUSES)]
        where, values = conditions(replace(query, status=()), "?")
        is_open, statuses = conditions(replace(query, status=query.status or STATUSES), "?")
        modes = ", ".join(f"'{mode}'" for mode in MODES)  # each mode is a range of the index, which ends with the stage
        sql = (
            f"SELECT (SELECT coalesce(sum({' + '.join(finished) or '0'}), 0) FROM statistics r WHERE {where}) "
            f"+ (SELECT count(*) FROM rollouts r WHERE {is_open} AND r.stage = 'open' AND r.mode IN ({modes}))"
        )
        return self._db.execute(sql, [*values, *statuses]).fetchone()[0]

    def _ranges(self, query: RolloutQuery) -> Iterator[Iterator[Rollout]]:
        """Yield sorted streams of rollouts: one per experiment, mode and stage that can match, or one of all."""
        is_filtered = query.experiment is not None or query.mode is not None or query.status
        if query.sort == "rollout_id" and not is_filtered:
            yield self._rows("1", (), query)
            return
        experiments = self._experiments() if query.experiment is None else [query.experiment]
        modes = MODES if query.mode is None else (query.mode,)
        wanted = set(query.status or STATUSES)
        for key in product(experiments, modes, wanted & TERMINAL_ROLLOUT):
            yield self._rows("experiment = ? AND mode = ? AND stage = ?", key, query)
        if "queued" in wanted:
            for key in product(experiments, modes):
                yield self._rows("experiment = ? AND mode = ? AND stage = 'open' AND status = 'queued'", key, query)
        if "running" in wanted:
            yield iter(select(self._running(), replace(query, limit=sys.maxsize)))

    def _running(self) -> list[Rollout]:
        """Return all running rollouts, about as many as there are workers."""
        rows = self._db.execute(
            f"SELECT {ROLLOUT} FROM attempts a JOIN rollouts r ON r.seq = a.id >> {ATTEMPT_BITS} "
            "WHERE a.status = 'running'"
        )
        return list(read_rollouts(rows, read_rollout))

    def _rows(self, where: str, values: tuple[Any, ...], query: RolloutQuery) -> Iterator[Rollout]:
        """Iterate lazily over the rollouts that follow the previous page, in the query's order."""
        behind, order, start = order_of(query, "?")
        sql = f"SELECT {ROLLOUT} FROM rollouts r WHERE {where} AND {behind} ORDER BY {order}"
        return read_rollouts(self._db.execute(sql, (*values, *start)), read_rollout)

    def _experiments(self) -> list[str]:
        """Return the names of all experiments, by skipping from name to name in the index."""
        rows = self._db.execute(
            """WITH RECURSIVE names(name) AS (
                SELECT min(experiment) FROM rollouts
                UNION ALL
                SELECT (SELECT min(experiment) FROM rollouts WHERE experiment > name) FROM names
                WHERE name IS NOT NULL)
            SELECT name FROM names WHERE name IS NOT NULL"""
        )
        return [name for (name,) in rows]

    def _need(self, rollout_id: str) -> Rollout:
        row = self._db.execute(f"SELECT {ROLLOUT} FROM rollouts r WHERE rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            raise NotFoundError("rollout", rollout_id)
        return read_rollout(row)

    def _seq(self, rollout_id: str) -> tuple[int, int | None]:
        """Return a rollout's number, and the key of its running or deciding attempt."""
        row = self._db.execute("SELECT seq, attempt FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            raise NotFoundError("rollout", rollout_id)
        return row

    def attempts(self, rollout_id: str) -> list[Attempt]:
        low = self._seq(rollout_id)[0] << ATTEMPT_BITS
        sql = "SELECT id, status, data FROM attempts WHERE id BETWEEN ? AND ? ORDER BY id"
        return [
            read_attempt(data, rollout_id, number=key & NUMBER_MASK, status=status)
            for key, status, data in self._db.execute(sql, (low, low | NUMBER_MASK))
        ]

    def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        attempt = self._attempt(rollout_id, attempt_id)
        low, high = span_range(attempt)

        def fetch(sequence: int) -> bytes:
            ((data,),) = self._db.execute("SELECT data FROM spans WHERE key = ?", (low | sequence,))
            return data

        unpacker = Unpacker(fetch, rollout_id=rollout_id, number=attempt & NUMBER_MASK)
        rows = self._db.execute(
            "SELECT key, data FROM spans WHERE key > ? AND key <= ? ORDER BY key LIMIT ?",
            (low + min(after, MAX_SEQUENCE), high, limit),
        )
        return [unpacker.unpack(data, sequence=key & MAX_SEQUENCE) for key, data in rows]

    def _attempt(self, rollout_id: str, attempt_id: str | None) -> int:
        """Return the key of the attempt whose spans are requested: a given one, else the running or deciding one."""
        seq, current = self._seq(rollout_id)
        if not attempt_id:
            return seq << ATTEMPT_BITS if attempt_id == "" or current is None else current
        key = seq << ATTEMPT_BITS | number_of(attempt_id)
        known = self._db.execute("SELECT 1 FROM attempts WHERE id = ?", (key,)).fetchone()
        if known is None or rollout_id_of(attempt_id) != rollout_id:
            raise unknown_attempt(rollout_id, attempt_id)
        return key

    def version(self, name: str, version: str | None) -> ResourceVersion | None:
        if version is None:
            sql, values = "SELECT data FROM versions WHERE name = ? ORDER BY seq DESC LIMIT 1", (name,)
        else:
            sql, values = "SELECT data FROM versions WHERE name = ? AND version = ?", (name, version)
        row = self._db.execute(sql, values).fetchone()
        return row and decode(row[0], ResourceVersion)

    def resources(self, name: str | None = None) -> list[ResourceVersion]:
        if name is not None:
            rows = self._db.execute("SELECT data FROM versions WHERE name = ? ORDER BY seq", (name,))
        else:
            rows = self._db.execute(
                """WITH RECURSIVE names(name) AS (
                    SELECT min(name) FROM versions
                    UNION ALL
                    SELECT (SELECT min(name) FROM versions v WHERE v.name > names.name) FROM names
                    WHERE name IS NOT NULL)
                SELECT (SELECT data FROM versions v WHERE v.name = names.name ORDER BY seq DESC LIMIT 1)
                FROM names WHERE name IS NOT NULL"""
            )
        return readable((data for (data,) in rows), ResourceVersion)

    def metrics(self, experiment: str, *, name: str | None = None, run: int | None = None) -> list[Metric]:
        asked = {key: value for key, value in (("name", name), ("run", run)) if value is not None}
        where = " AND ".join(f"{column} = ?" for column in ("experiment", *asked))
        index = "INDEXED BY metrics_by_name" if name is not None else ""
        columns = "run, algorithm, step, name, experiment_step, time"
        rows = self._db.execute(
            f"SELECT value, {columns} FROM metrics {index} WHERE {where} ORDER BY run, algorithm, step, name",
            (experiment, *asked.values()),
        )
        return [
            Metric(experiment=experiment, value=_float(value), **dict(zip(columns.split(", "), row, strict=True)))
            for value, *row in rows
        ]

    def statistics(self, experiment: str | None = None) -> list[Statistics]:
        where, values = ("1", ()) if experiment is None else ("experiment = ?", (experiment,))
        return read_statistics(self._db.execute(f"SELECT {STATISTICS} FROM statistics WHERE {where}", values))

    def get(self, key: bytes) -> bytes | None:
        row = self._db.execute("SELECT value FROM documents WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def scan(self, start: bytes, stop: bytes, *, limit: int = sys.maxsize) -> list[tuple[bytes, bytes]]:
        sql = "SELECT key, value FROM documents WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
        return self._db.execute(sql, (start, stop, limit)).fetchall()


def _float(value: float | None) -> float:
    """Convert a stored number; NULL becomes NaN, because SQLite stores a NaN as NULL."""
    return math.nan if value is None else value
