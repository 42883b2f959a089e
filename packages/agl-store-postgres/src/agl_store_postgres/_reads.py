"""Answers reads within one read transaction, outside of the writer's thread."""

import sys
from itertools import islice, product
from typing import Any

from msgspec.structs import replace
from psycopg import Cursor

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
from agl.stores import MAX_SEQUENCE, readable, select, unknown_attempt
from agl_store_postgres.connections import Connection
from agl_store_postgres.partitions import Aim, bounds, period_of
from agl_store_sqlite.sql.packing import Unpacker
from agl_store_sqlite.sql.rows import (
    ATTEMPT_BITS,
    MODES,
    NUMBER_MASK,
    ROLLOUT,
    STATUSES,
    Row,
    by_status,
    conditions,
    containing,
    number_of,
    order_of,
    read_attempt,
    read_change,
    read_rollout,
    read_rollouts,
    readable_page,
)
from agl_store_sqlite.sql.statistics import STATISTICS, read_statistics

ATTEMPT_KEY = f"coalesce(r.seq << {ATTEMPT_BITS} | %s::int, r.attempt, r.seq << {ATTEMPT_BITS})"
"""The key of the attempt whose spans are read: the attempt with the given number, else the deciding or running one."""

_ATTEMPT = (
    "SELECT k.key, EXISTS (SELECT 1 FROM attempts a WHERE a.id = k.key) "
    f"FROM (SELECT {ATTEMPT_KEY} AS key FROM rollouts r WHERE r.rollout_id = %s) AS k"
).encode()
_SPANS = (
    f"SELECT s.sequence, s.data FROM rollouts r JOIN spans s ON s.attempt = {ATTEMPT_KEY} "
    "WHERE r.rollout_id = %s AND s.sequence > %s ORDER BY s.sequence LIMIT %s"
).encode()

_SPAN = b"SELECT s.data FROM spans s WHERE s.attempt = %s AND s.sequence = %s"

_WITHIN = (
    "AND (r.experiment, r.mode, r.stage) >= (k.experiment, k.mode, k.stage) "
    "AND (r.experiment, r.mode, r.stage) <= (k.experiment, k.mode, k.stage)"
)
"""Redundant conditions, which restate three equations as bounds.

If PostgreSQL's statistics know only one list, the planner assumes that every rollout is in it and would search all
rollouts by id; with these conditions it uses the index of the lists.
"""


class PostgresReads:
    """Implements :class:`agl.stores.Reads` for one transaction."""

    def __init__(self, db: Connection) -> None:
        self._db = db

    def changes(self, after: int, limit: int) -> list[Change]:
        rows = self._all(
            "SELECT c.cursor, c.kind, c.status, c.name, c.attempt, r.rollout_id, r.experiment FROM changes c "
            f"LEFT JOIN rollouts r ON r.seq = c.attempt >> {ATTEMPT_BITS} WHERE c.cursor > %s AND c.kind <> 'gone' "
            "ORDER BY c.cursor LIMIT %s",
            after,
            limit,
        )
        return [read_change(row) for row in rows]

    def cursor(self) -> int:
        ((newest,),) = self._all("SELECT coalesce(max(cursor), 0) FROM changes")
        return newest

    def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        if query.ids:
            return select(self._named(query.ids), query)
        if query.contains:
            return list(islice(containing(self.rollouts, query), query.limit))
        if query.sort == "status":
            return by_status(self.rollouts, query)
        if query.group_id:
            return self._listed(query, where="r.group_id = %s AND r.group_id <> ''", values=(query.group_id,))
        is_filtered = query.experiment is not None or query.mode is not None or query.status
        if query.sort == "rollout_id" and not is_filtered:
            return self._listed(query)
        found = self._by_lists(query)
        if "running" in (query.status or STATUSES):
            found += self._running()
        return select(found, query)

    def _named(self, ids: tuple[str, ...]) -> list[Rollout]:
        rows = self._all(f"SELECT {ROLLOUT} FROM rollouts r WHERE rollout_id = ANY(%s::text[])", list(ids))
        found = {rollout.rollout_id: rollout for rollout in map(read_rollout, rows)}
        for rollout_id in ids:
            if rollout_id not in found:
                raise NotFoundError("rollout", rollout_id)
        return [found[rollout_id] for rollout_id in ids]

    def _listed(self, query: RolloutQuery, *, where: str = "true", values: tuple[Any, ...] = ()) -> list[Rollout]:
        """Return one page of the rollouts that match ``where`` and the rest of the query."""
        filters, given = conditions(query, "%s")
        behind, order, start = order_of(query, "%s")
        sql = f"SELECT {ROLLOUT} FROM rollouts r WHERE {where} AND {filters} AND {behind} ORDER BY {order} LIMIT %s"
        return readable_page(lambda limit: self._all(sql, *values, *given, *start, limit), read_rollout, query.limit)

    def count_rollouts(self, query: RolloutQuery) -> int:
        if query.ids:
            return len(self.rollouts(replace(query, after="", limit=len(query.ids))))
        if query.contains:
            return sum(1 for _ in containing(self.rollouts, replace(query, after="")))
        where, values = conditions(query, "%s")
        return self._all(f"SELECT count(*) FROM rollouts r WHERE {where}", *values)[0][0]

    def _by_lists(self, query: RolloutQuery) -> list[Rollout]:
        """Return a page merged from the sorted lists of each (experiment, mode, stage); leaves out running rollouts."""
        experiments = self._experiments() if query.experiment is None else [query.experiment]
        modes = MODES if query.mode is None else (query.mode,)
        wanted = set(query.status or STATUSES)
        stages = [*(wanted & TERMINAL_ROLLOUT), *(["open"] if "queued" in wanted else [])]
        keys = list(product(experiments, modes, stages))
        behind, order, start = order_of(query, "%s")
        group = "" if query.group_id is None else "AND r.group_id = ''"
        sql = (
            "SELECT r.* FROM unnest(%s::text[], %s::text[], %s::text[]) AS k(experiment, mode, stage) "
            f"CROSS JOIN LATERAL (SELECT {ROLLOUT}, r.created_at FROM rollouts r "
            f"WHERE r.experiment = k.experiment AND r.mode = k.mode AND r.stage = k.stage {_WITHIN} "
            f"AND r.status <> 'running' {group} AND {behind} ORDER BY {order} LIMIT %s) AS r "
            f"ORDER BY {order} LIMIT %s"
        )
        columns = [[key[at] for key in keys] for at in range(3)]

        def fetch(limit: int) -> list[Row]:
            return self._all(sql, *columns, *start, limit, limit)

        return readable_page(fetch, lambda row: read_rollout(row[:-1]), query.limit)

    def _running(self) -> list[Rollout]:
        """Return all running rollouts; there are few, at most one for each slot of a worker."""
        rows = self._all(
            f"SELECT {ROLLOUT} FROM attempts a JOIN rollouts r ON r.seq = a.id >> {ATTEMPT_BITS} "
            "WHERE a.status = 'running'",
        )
        return list(read_rollouts(rows, read_rollout))

    def _experiments(self) -> list[str]:
        """Return the names of all experiments, by skipping through the index."""
        rows = self._all(
            """WITH RECURSIVE names(name) AS (
                SELECT min(experiment) FROM rollouts
                UNION ALL
                SELECT (SELECT min(experiment) FROM rollouts WHERE experiment > name) FROM names WHERE name IS NOT NULL)
            SELECT name FROM names WHERE name IS NOT NULL""",
        )
        return [name for (name,) in rows]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        rows = self._all(
            f"SELECT a.id, a.status, a.data FROM rollouts r LEFT JOIN attempts a "
            f"ON a.id BETWEEN r.seq << {ATTEMPT_BITS} AND (r.seq << {ATTEMPT_BITS} | {NUMBER_MASK}) "
            "WHERE r.rollout_id = %s ORDER BY a.id",
            rollout_id,
        )
        if not rows:
            raise NotFoundError("rollout", rollout_id)
        return [
            read_attempt(data, rollout_id, number=key & NUMBER_MASK, status=status)
            for key, status, data in rows
            if key is not None
        ]

    def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        number = None if attempt_id is None else number_of(attempt_id) if attempt_id else 0
        where = (number, rollout_id)
        known = self._db.execute(_ATTEMPT, where, binary=True)
        page = self._page((*where, min(after, MAX_SEQUENCE), limit))
        attempt = _known_attempt(known.fetchone(), rollout_id, attempt_id)
        if self._is_missed(attempt):
            page = self._page((*where, min(after, MAX_SEQUENCE), limit))

        def fetch(sequence: int) -> bytes:
            ((data,),) = self._db.execute(_SPAN + self._within, (attempt, sequence), binary=True).fetchall()
            return data

        unpacker = Unpacker(fetch, rollout_id=rollout_id, number=attempt & NUMBER_MASK)
        return [unpacker.unpack(data, sequence=sequence) for sequence, data in page.fetchall()]

    def _page(self, values: tuple[Any, ...]) -> Cursor[Row]:
        return self._db.execute(_SPANS.replace(b" ORDER", self._within + b" ORDER"), values, binary=True)

    @property
    def _within(self) -> bytes:
        """Conditions on ``s.attempt`` from which the planner sees in which partitions the requested spans should be."""
        return b""

    def _is_missed(self, attempt: int) -> bool:
        """Return true if an attempt's spans are outside of the conditions :attr:`_within`, and correct these."""
        return False

    def version(self, name: str, version: str | None) -> ResourceVersion | None:
        if version is None:
            rows = self._all("SELECT data FROM versions WHERE name = %s ORDER BY seq DESC LIMIT 1", name)
        else:
            rows = self._all("SELECT data FROM versions WHERE name = %s AND version = %s", name, version)
        return decode(rows[0][0], ResourceVersion) if rows else None

    def resources(self, name: str | None = None) -> list[ResourceVersion]:
        if name is not None:
            rows = self._all("SELECT data FROM versions WHERE name = %s ORDER BY seq", name)
        else:
            rows = self._all(
                """WITH RECURSIVE names(name) AS (
                    SELECT min(name) FROM versions
                    UNION ALL
                    SELECT (SELECT min(name) FROM versions v WHERE v.name > names.name) FROM names
                    WHERE name IS NOT NULL)
                SELECT (SELECT data FROM versions v WHERE v.name = names.name ORDER BY seq DESC LIMIT 1)
                FROM names WHERE name IS NOT NULL""",
            )
        return readable((data for (data,) in rows), ResourceVersion)

    def get(self, key: bytes) -> bytes | None:
        rows = self._all("SELECT value FROM documents WHERE key = %b", key)
        return rows[0][0] if rows else None

    def scan(self, start: bytes, stop: bytes, *, limit: int = sys.maxsize) -> list[tuple[bytes, bytes]]:
        sql = "SELECT key, value FROM documents WHERE key >= %b AND key < %b ORDER BY key LIMIT %s"
        return [(key, value) for key, value in self._all(sql, start, stop, limit)]

    def metrics(self, experiment: str, *, name: str | None = None, run: int | None = None) -> list[Metric]:
        asked = {key: value for key, value in (("name", name), ("run", run)) if value is not None}
        where = " AND ".join(f"{column} = %s" for column in ("experiment", *asked))
        columns = "run, algorithm, step, name, experiment_step, value, time"
        rows = self._all(
            f"SELECT {columns} FROM metrics WHERE {where} ORDER BY run, algorithm, step, name",
            experiment,
            *asked.values(),
        )
        return [Metric(experiment=experiment, **dict(zip(columns.split(", "), row, strict=True))) for row in rows]

    def statistics(self, experiment: str | None = None) -> list[Statistics]:
        where, values = ("true", ()) if experiment is None else ("experiment = %s", (experiment,))
        return read_statistics(self._all(f"SELECT {STATISTICS} FROM statistics WHERE {where}", *values))

    def _all(self, query: str, *params: Any) -> list[Row]:
        return self._db.execute(query.encode(), params, binary=True).fetchall()


class PartitionedReads(PostgresReads):
    """Reads from a partitioned table of spans; expects spans in the partition of the last read.

    Args:
        db: The connection, in a transaction.
        aim: The period of the last read; shared by successive transactions.
    """

    def __init__(self, db: Connection, *, aim: Aim) -> None:
        super().__init__(db)
        self._aim = aim
        self._period = aim.period

    @property
    def _within(self) -> bytes:
        return bounds(self._period, self._period)

    def _is_missed(self, attempt: int) -> bool:
        is_missed = period_of(attempt) != self._period
        self._aim.period = self._period = period_of(attempt)
        return is_missed


def _known_attempt(row: Row | None, rollout_id: str, attempt_id: str | None) -> int:
    """Return the attempt's key; raises :class:`NotFoundError` for an unknown rollout or attempt."""
    if row is None:
        raise NotFoundError("rollout", rollout_id)
    key, is_known = row
    if attempt_id and (not is_known or rollout_id_of(attempt_id) != rollout_id):
        raise unknown_attempt(rollout_id, attempt_id)
    return key
