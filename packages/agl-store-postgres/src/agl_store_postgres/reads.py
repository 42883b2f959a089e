"""What the store reads outside of the writer's thread, each function within one read transaction."""

from itertools import product
from typing import Any, get_args

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
    Row,
    Unpacker,
    engine,
    number_of,
    read_rollout,
    rules,
)
from agl_store_postgres.links import Connection

MODES: tuple[Mode, ...] = get_args(Mode)
STATUSES: tuple[RolloutStatus, ...] = get_args(RolloutStatus)


_KEY = f"coalesce(r.seq << {ATTEMPT_BITS} | %s::int, r.attempt, r.seq << {ATTEMPT_BITS})"
"""The attempt whose spans are meant: the one with that number, else the deciding or running one, else none."""

_ATTEMPT = (
    "SELECT k.key, EXISTS (SELECT 1 FROM attempts a WHERE a.id = k.key) "
    f"FROM (SELECT {_KEY} AS key FROM rollouts r WHERE r.rollout_id = %s) AS k"
).encode()
_SPANS = (
    f"SELECT s.sequence, s.data FROM rollouts r JOIN spans s ON s.attempt = {_KEY} "
    "WHERE r.rollout_id = %s AND s.sequence > %s ORDER BY s.sequence LIMIT %s"
).encode()


def changes(db: Connection, after: int, limit: int) -> list[Change]:
    """See :meth:`agl.contracts.Store.changes`."""
    rows = _all(
        db,
        "SELECT c.cursor, c.kind, c.status, c.name, c.attempt, r.rollout_id, r.experiment FROM changes c "
        f"LEFT JOIN rollouts r ON r.seq = c.attempt >> {ATTEMPT_BITS} WHERE c.cursor > %s AND c.kind <> 'gone' "
        "ORDER BY c.cursor LIMIT %s",
        after,
        limit,
    )
    return [_change(row) for row in rows]


def _change(row: Row) -> Change:
    cursor, kind, status, name, attempt, rollout_id, experiment = row
    if kind == "resource":
        return Change(cursor=cursor, kind=kind, key=name, status=status)
    number = attempt & NUMBER_MASK
    attempt_id = attempt_id_of(rollout_id, number) if number else ""
    return Change(cursor=cursor, kind=kind, key=rollout_id, attempt_id=attempt_id, status=status, experiment=experiment)


def cursor(db: Connection) -> int:
    """The newest change's cursor."""
    ((newest,),) = _all(db, "SELECT coalesce(max(cursor), 0) FROM changes")
    return newest


def rollouts(db: Connection, query: RolloutQuery) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.rollouts`."""
    if query.ids:
        return rules.select(_named(db, query.ids), query)
    if query.group_id:
        return _listed(db, query, where="r.group_id = %s AND r.group_id <> ''", values=(query.group_id,))
    if query.experiment is None and query.mode is None and not query.status:
        return _listed(db, query)
    found = _by_lists(db, query)
    if "running" in (query.status or STATUSES):
        found += _running(db)
    return rules.select(found, query)


def _named(db: Connection, ids: tuple[str, ...]) -> list[Rollout]:
    rows = _all(db, f"SELECT {ROLLOUT} FROM rollouts r WHERE rollout_id = ANY(%s::text[])", list(ids))
    found = {rollout.rollout_id: rollout for rollout in map(read_rollout, rows)}
    for rollout_id in ids:
        if rollout_id not in found:
            raise NotFoundError("rollout", rollout_id)
    return [found[rollout_id] for rollout_id in ids]


def _listed(db: Connection, query: RolloutQuery, *, where: str = "true", values: tuple[Any, ...] = ()) -> list[Rollout]:
    """One page of those that match ``where`` and the rest of the query."""
    conditions, given = [where], list(values)
    for column, value in (("experiment", query.experiment), ("mode", query.mode), ("group_id", query.group_id)):
        if value is not None:
            conditions.append(f"r.{column} = %s")
            given.append(value)
    if query.status:
        conditions.append("r.status = ANY(%s::text[])")
        given.append(list(query.status))
    behind, order = _direction(query)
    sql = f"SELECT {ROLLOUT} FROM rollouts r WHERE {' AND '.join(conditions)} AND {behind} ORDER BY {order} LIMIT %s"
    return [read_rollout(row) for row in _all(db, sql, *given, query.after, query.after, query.limit)]


def _by_lists(db: Connection, query: RolloutQuery) -> list[Rollout]:
    """One page out of one sorted list for each (experiment, mode, stage) that can match, running ones apart."""
    experiments = _experiments(db) if query.experiment is None else [query.experiment]
    modes = MODES if query.mode is None else (query.mode,)
    wanted = set(query.status or STATUSES)
    stages = [*(wanted & TERMINAL_ROLLOUT), *(["open"] if "queued" in wanted else [])]
    keys = list(product(experiments, modes, stages))
    behind, order = _direction(query)
    group = "" if query.group_id is None else "AND r.group_id = ''"
    sql = (
        f"SELECT r.* FROM unnest(%s::text[], %s::text[], %s::text[]) AS k(experiment, mode, stage) CROSS JOIN LATERAL "
        f"(SELECT {ROLLOUT}, r.rollout_id FROM rollouts r WHERE r.experiment = k.experiment AND r.mode = k.mode "
        f"AND r.stage = k.stage AND r.status <> 'running' {group} AND {behind} ORDER BY {order} LIMIT %s) AS r "
        f"ORDER BY {order} LIMIT %s"
    )
    columns = [[key[at] for key in keys] for at in range(3)]
    rows = _all(db, sql, *columns, query.after, query.after, query.limit, query.limit)
    return [read_rollout(row[:-1]) for row in rows]


def _direction(query: RolloutQuery) -> tuple[str, str]:
    """The condition, which takes ``after`` twice, and the order of a query."""
    compare, order = ("<", "DESC") if query.is_newest_first else (">", "ASC")
    return f"(%s = '' OR r.rollout_id {compare} %s)", f"r.rollout_id {order}"


def _running(db: Connection) -> list[Rollout]:
    """All running rollouts: as many as there are workers."""
    rows = _all(
        db,
        f"SELECT {ROLLOUT} FROM attempts a JOIN rollouts r ON r.seq = a.id >> {ATTEMPT_BITS} "
        "WHERE a.status = 'running'",
    )
    return [read_rollout(row) for row in rows]


def _experiments(db: Connection) -> list[str]:
    """All experiments, by skipping through the index."""
    rows = _all(
        db,
        """WITH RECURSIVE names(name) AS (
            SELECT min(experiment) FROM rollouts
            UNION ALL
            SELECT (SELECT min(experiment) FROM rollouts WHERE experiment > name) FROM names WHERE name IS NOT NULL)
        SELECT name FROM names WHERE name IS NOT NULL""",
    )
    return [name for (name,) in rows]


def attempts(db: Connection, rollout_id: str) -> list[Attempt]:
    """See :meth:`agl.contracts.Store.attempts`."""
    rows = _all(
        db,
        f"SELECT a.data FROM rollouts r LEFT JOIN attempts a ON a.id BETWEEN r.seq << {ATTEMPT_BITS} "
        f"AND (r.seq << {ATTEMPT_BITS} | {NUMBER_MASK}) WHERE r.rollout_id = %s ORDER BY a.id",
        rollout_id,
    )
    if not rows:
        raise NotFoundError("rollout", rollout_id)
    return [decode(data, Attempt) for (data,) in rows if data is not None]


def spans(db: Connection, rollout_id: str, attempt_id: str | None, *, after: int, limit: int) -> list[Span]:
    """See :meth:`agl.contracts.Store.spans`."""
    number = None if attempt_id is None else number_of(attempt_id) if attempt_id else 0
    where = (number, rollout_id)
    known = db.execute(_ATTEMPT, where, binary=True)
    page = db.execute(_SPANS, (*where, min(after, MAX_SEQUENCE), limit), binary=True)
    attempt = _known_attempt(known.fetchone(), rollout_id, attempt_id)

    def fetch(sequence: int) -> bytes:
        ((data,),) = _all(db, "SELECT data FROM spans WHERE attempt = %s AND sequence = %s", attempt, sequence)
        return data

    unpacker = Unpacker(fetch)
    return [unpacker.unpack(data, sequence=sequence) for sequence, data in page.fetchall()]


def _known_attempt(row: Row | None, rollout_id: str, attempt_id: str | None) -> int:
    """The attempt's key; raises :class:`NotFoundError` where rollout or attempt are unknown."""
    if row is None:
        raise NotFoundError("rollout", rollout_id)
    key, is_known = row
    if attempt_id and (not is_known or rollout_id_of(attempt_id) != rollout_id):
        raise engine.unknown_attempt(rollout_id, attempt_id)
    return key


def resource(db: Connection, name: str, version: str | None) -> ResourceVersion:
    """See :meth:`agl.contracts.Store.resource`."""
    if version is None:
        rows = _all(db, "SELECT data FROM versions WHERE name = %s ORDER BY seq DESC LIMIT 1", name)
    else:
        rows = _all(db, "SELECT data FROM versions WHERE name = %s AND version = %s", name, version)
    if not rows:
        raise engine.unknown_resource(name, version)
    return decode(rows[0][0], ResourceVersion)


def resources(db: Connection, name: str | None) -> list[ResourceVersion]:
    """See :meth:`agl.contracts.Store.resources`."""
    if name is not None:
        rows = _all(db, "SELECT data FROM versions WHERE name = %s ORDER BY seq", name)
    else:
        rows = _all(
            db,
            """WITH RECURSIVE names(name) AS (
                SELECT min(name) FROM versions
                UNION ALL
                SELECT (SELECT min(name) FROM versions v WHERE v.name > names.name) FROM names WHERE name IS NOT NULL)
            SELECT (SELECT data FROM versions v WHERE v.name = names.name ORDER BY seq DESC LIMIT 1)
            FROM names WHERE name IS NOT NULL""",
        )
    return [decode(data, ResourceVersion) for (data,) in rows]


def states(db: Connection, prefix: str) -> dict[str, bytes]:
    """See :meth:`agl.contracts.Store.load_state`."""
    rows = _all(
        db,
        "SELECT key, value FROM states WHERE key >= %s AND starts_with(key, %s) "
        "AND (%s::text IS NULL OR key < %s) ORDER BY key",
        prefix,
        prefix,
        *[_above(prefix)] * 2,
    )
    return dict(rows)


def _above(prefix: str) -> str | None:
    """A bound above all keys with that prefix, ``None`` for no bound; U+10FFFF sorts behind every other character."""
    return f"{prefix}\U0010ffff\U0010ffff" if prefix else None


def metrics(db: Connection, experiment: str, name: str | None) -> list[Metric]:
    """See :meth:`agl.contracts.Store.metrics`."""
    condition, values = ("", ()) if name is None else ("AND name = %s", (name,))
    rows = _all(
        db,
        f"SELECT algorithm, step, name, value, time FROM metrics WHERE experiment = %s {condition} "
        "ORDER BY algorithm, step, name",
        experiment,
        *values,
    )
    return [
        Metric(experiment=experiment, algorithm=algorithm, step=step, name=of, value=value, time=time)
        for algorithm, step, of, value, time in rows
    ]


def _all(db: Connection, query: str, *params: Any) -> list[Row]:
    return db.execute(query.encode(), params, binary=True).fetchall()
