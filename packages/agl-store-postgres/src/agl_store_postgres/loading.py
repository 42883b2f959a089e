"""Begins a transaction: locks and reads the rows that its operations need, in one round trip.

PostgreSQL takes a fresh snapshot for every statement, so rows that are read after the locks stay as they are while the
locks are held. Rollouts are locked in the order of their numbers, before attempts and spans are read.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agl.schemas import ResourceVersion, Span, decode, rollout_id_of
from agl_store_postgres.connections import Connection
from agl_store_postgres.partitions import Aim, Partitions, bounds, period_of
from agl_store_sqlite.sql.changes import LoadedRows
from agl_store_sqlite.sql.needs import Needs, queues_of
from agl_store_sqlite.sql.rows import ATTEMPT_BITS, ROLLOUT, Row, number_of

Rows: TypeAlias = Iterable[Row]

BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
NOW = b"extract(epoch FROM clock_timestamp())::float8"

_CLOCK = b"SELECT " + NOW + b", (SELECT min(deadline) FROM attempts WHERE status = 'running')"
_LOCK_NAMES = b"SELECT pg_advisory_xact_lock(hashtextextended(name, 1)) FROM unnest(%s::text[]) AS c(name)"
_LOCK_ROLLOUTS = f"SELECT {ROLLOUT} FROM rollouts r WHERE rollout_id = ANY(%s::text[]) ORDER BY seq FOR UPDATE".encode()
_ATTEMPT = "r.rollout_id, a.id, a.status, a.data"
_CURRENT = (
    f"SELECT {_ATTEMPT} FROM rollouts r JOIN attempts a ON a.id = r.attempt WHERE r.rollout_id = ANY(%s::text[])"
).encode()
_NAMED = (
    f"SELECT {_ATTEMPT} FROM unnest(%s::text[], %s::int[]) AS w(rollout_id, number) "
    "JOIN rollouts r ON r.rollout_id = w.rollout_id "
    f"JOIN attempts a ON a.id = (r.seq << {ATTEMPT_BITS} | w.number)"
).encode()
_CLAIMED = (
    f"SELECT {ROLLOUT}, {_ATTEMPT} FROM attempts a JOIN rollouts r ON r.seq = a.id >> {ATTEMPT_BITS} "
    "WHERE a.status = 'running' AND a.claim_id = ANY(%s::text[]) ORDER BY a.id"
).encode()
_LAST = (
    f"SELECT w.key, (SELECT max(s.sequence) FROM spans s WHERE s.attempt = w.key) FROM ("
    f"SELECT r.seq << {ATTEMPT_BITS} | w.number AS key FROM unnest(%s::text[], %s::int[]) AS w(rollout_id, number) "
    "JOIN rollouts r ON r.rollout_id = w.rollout_id) AS w"
).encode()
_KEPT = (
    b"SELECT s.attempt, s.span_id FROM unnest(%s::text[], %s::int[], %s::text[]) AS w(rollout_id, number, span_id) "
    b"JOIN rollouts r ON r.rollout_id = w.rollout_id "
    + f"JOIN spans s ON s.attempt = (r.seq << {ATTEMPT_BITS} | w.number) AND s.span_id = w.span_id".encode()
)
_SHARDED_LAST = (
    f"SELECT w.key, m.last, w.shard FROM (SELECT r.seq << {ATTEMPT_BITS} | w.number AS key, r.shard "
    "FROM unnest(%s::text[], %s::int[]) AS w(rollout_id, number) JOIN rollouts r ON r.rollout_id = w.rollout_id) AS w "
    "LEFT JOIN span_marks m ON m.attempt = w.key"
).encode()
_QUEUE = f"SELECT {ROLLOUT} FROM rollouts r WHERE status = 'queued' ORDER BY seq LIMIT %s FOR UPDATE SKIP LOCKED"
_NUMBERS = b"SELECT nextval(pg_get_serial_sequence('rollouts', 'seq')) FROM generate_series(1, %s)"
_NUMBERS_OF_PERIOD = b"SELECT agl_numbers(%s::int)"
_LOCK_LAPSED = (
    f"SELECT {ROLLOUT} FROM rollouts r WHERE seq = ANY(ARRAY(SELECT id >> {ATTEMPT_BITS} FROM attempts "
    "WHERE status = 'running' AND deadline <= %s ORDER BY deadline LIMIT 1000)) ORDER BY seq FOR UPDATE SKIP LOCKED"
).encode()
_LAPSED = (
    f"SELECT {_ATTEMPT} FROM rollouts r JOIN attempts a ON a.id = r.attempt WHERE r.seq = ANY(%s::bigint[]) "
    "AND a.status = 'running' AND a.deadline <= %s ORDER BY a.deadline, a.id"
).encode()
_VERSIONS = (
    b"SELECT v.data FROM unnest(%s::text[], %s::text[]) AS w(name, version) "
    b"JOIN versions v ON v.name = w.name AND v.version = w.version"
)
_DOCUMENTS = b"SELECT key, value FROM documents WHERE key = ANY(%b::bytea[])"
_XID = b"SELECT pg_current_xact_id_if_assigned()::text"
"""The id of a transaction that locked or wrote rows. A transaction without an id did neither, and may be repeated."""


class Queries:
    """Sends statements, and reads their results only after all have been sent."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._cursors: dict[str, list[Any]] = {}
        self._fetched: dict[str, list[Row]] = {}

    def send(self, name: str, query: bytes, *params: Any) -> None:
        """Send a statement; :meth:`rows` returns its rows by ``name``."""
        cursor = self._db.execute(query, params, binary=True)
        self._cursors.setdefault(name, []).append(cursor)

    def rows(self, name: str) -> list[Row]:
        """Return the rows of all statements that were sent under ``name``."""
        if name not in self._fetched:
            self._fetched[name] = [row for cursor in self._cursors.get(name, ()) for row in cursor.fetchall()]
        return self._fetched[name]


@dataclass(kw_only=True)
class Begun:
    """A transaction that began.

    Attributes:
        rows: The rows that the operations need.
        xid: The transaction's id, by which to ask the server later whether it was committed; ``None`` if the
            transaction has locked and written nothing.
        shards: The shard of each attempt to which spans are appended, by the attempt's number; empty in a store without
            shards.
    """

    rows: LoadedRows
    xid: str | None
    shards: dict[int, int] = field(default_factory=dict[int, int])


def begin(
    db: Connection, needs: Sequence[Needs], *, shards: Sequence[int] = (), partitions: Partitions | None = None
) -> Begun:
    """Begin a transaction and load the rows that these operations need; psycopg's errors pass through.

    Args:
        db: The connection to the server, or to the control server.
        needs: The rows to load.
        shards: In a store with shards, the shards that this process can reach; rollouts on others are not claimed. Of
            the spans on shards, only the last acknowledged sequence is loaded; the caller loads the rest.
        partitions: The partitions of the store's spans, if it has any.
    """
    queries = Queries(db)
    queues = queues_of(needs)
    with db.pipeline():
        db.execute(BEGIN)
        queries.send("clock", _CLOCK)
        _query_rollouts(queries, needs)
        spans = [span for need in needs for span in need.spans]
        aim = partitions.aim if partitions is not None and not shards else None
        _query_spans(queries, spans, is_sharded=bool(shards), aim=aim)
        for experiment, limit in queues.items():
            queries.send(f"queue {experiment!r}", *_queue(experiment, shards), limit)
        _query_versions(queries, needs)
        if keys := [key for need in needs for key in need.documents]:
            queries.send("documents", _DOCUMENTS, keys)
        if new := sum(need.new for need in needs):
            queries.send("numbers", _NUMBERS if partitions is None else _NUMBERS_OF_PERIOD, new)
        queries.send("xid", _XID)
    loaded, xid = _read(queries, queues)
    for experiment, limit in queues.items():
        _pass_over_damaged(db, loaded, experiment, shards, limit=limit)
    if aim is not None and spans:
        _aim_again(db, spans, loaded, aim)
    return Begun(rows=loaded, xid=xid, shards={row[0]: row[2] for row in queries.rows("last")} if shards else {})


def begin_lapsed(db: Connection) -> tuple[LoadedRows, list[str]]:
    """Begin a transaction on the overdue attempts that no other machine has locked; returns their ids by deadline."""
    db.execute(BEGIN)
    ((now, _),) = db.execute(_CLOCK, binary=True).fetchall()
    loaded = LoadedRows(now=now)
    for row in db.execute(_LOCK_LAPSED, (now,), binary=True).fetchall():
        loaded.put_rollout(row)
    for row in db.execute(_LAPSED, (list(loaded.seqs.values()), now), binary=True).fetchall():
        loaded.put_attempt(*row)
    return loaded, list(loaded.attempts)


def _queue(experiment: str | None, shards: Sequence[int]) -> tuple[Any, ...]:
    """Return the query for queued rollouts, and its parameters except the last one, which is the limit."""
    given = {"experiment = %s": experiment, "shard = ANY(%s::smallint[])": list(shards) or None}
    wanted = {condition: value for condition, value in given.items() if value is not None}
    query = _QUEUE.replace("ORDER", "".join(f"AND {condition} " for condition in wanted) + "ORDER").encode()
    return query, *wanted.values()


def _pass_over_damaged(
    db: Connection, loaded: LoadedRows, experiment: str | None, shards: Sequence[int], *, limit: int
) -> None:
    """Load more queued rollouts until ``limit`` can be read, or there are no more."""
    found, most = loaded.queues[experiment], limit
    while len(found) == most and most - limit < sum(rollout_id in loaded.damaged for rollout_id in found):
        most *= 2
        query, *values = _queue(experiment, shards)
        found = [loaded.put_rollout(row) for row in db.execute(query, (*values, most), binary=True).fetchall()]
    loaded.queues[experiment] = found


def _query_rollouts(queries: Queries, needs: Sequence[Needs]) -> None:
    claim_ids = {claim_id for need in needs for claim_id in need.claim_ids}
    if names := sorted(claim_ids.union(*(need.locks for need in needs))):
        queries.send("none", _LOCK_NAMES, names)
    if claim_ids:
        queries.send("claimed", _CLAIMED, list(claim_ids))
    whole = {rollout_id for need in needs for rollout_id in need.rollout_ids}
    named = {attempt_id for need in needs for attempt_id in need.attempt_ids}
    named |= {span.attempt_id for need in needs for span in need.spans if span.attempt_id}
    locked = whole | {rollout_id_of(attempt_id) for attempt_id in named}
    locked |= {span.rollout_id for need in needs for span in need.spans}
    if locked:
        queries.send("rollouts", _LOCK_ROLLOUTS, list(locked))
    if whole:
        queries.send("attempts", _CURRENT, list(whole))
    if named:
        ids = list(named)
        queries.send("attempts", _NAMED, [rollout_id_of(each) for each in ids], [number_of(each) for each in ids])


def _aim_again(db: Connection, spans: Sequence[Span], loaded: LoadedRows, aim: Aim) -> None:
    """Repeat the query for spans if they are in an earlier partition than expected, and correct the aim."""
    oldest = min((period_of(key) for key in loaded.last), default=aim.period)
    is_missed, aim.period = oldest < aim.period, oldest
    if is_missed:
        queries = Queries(db)
        with db.pipeline():
            _query_spans(queries, spans, is_sharded=False, aim=aim)
        _put_spans(queries, loaded)


def _query_spans(queries: Queries, spans: Sequence[Span], *, is_sharded: bool, aim: Aim | None) -> None:
    if not spans:
        return
    where = [(span.rollout_id, number_of(span.attempt_id) if span.attempt_id else 0) for span in spans]
    targets = list(dict.fromkeys(where))
    within = b"" if aim is None else bounds(aim.period)
    last = _SHARDED_LAST if is_sharded else _LAST.replace(b"= w.key)", b"= w.key" + within + b")")
    queries.send("last", last, [each[0] for each in targets], [each[1] for each in targets])
    if is_sharded:
        return
    ids = [span.span_id for span in spans]
    queries.send("kept", _KEPT + within, [at[0] for at in where], [at[1] for at in where], ids)


def _query_versions(queries: Queries, needs: Sequence[Needs]) -> None:
    versions = [version for need in needs for version in need.versions]
    if versions:
        queries.send("versions", _VERSIONS, [name for name, _ in versions], [version for _, version in versions])


def _put_spans(queries: Queries, loaded: LoadedRows) -> None:
    loaded.last = {row[0]: row[1] or 0 for row in queries.rows("last")}
    loaded.kept = {(attempt, span_id) for attempt, span_id in queries.rows("kept")}


def _read(queries: Queries, queues: Iterable[str | None]) -> tuple[LoadedRows, str | None]:
    ((now, deadline),) = queries.rows("clock")
    loaded = LoadedRows(now=now, next_deadline=math.inf if deadline is None else deadline)
    for row in queries.rows("claimed"):
        loaded.put_rollout(row[:-4])
        loaded.put_attempt(*row[-4:])
    for row in queries.rows("rollouts"):  # after the claimed ones: these rows are locked and therefore current
        loaded.put_rollout(row)
    for row in queries.rows("attempts"):
        loaded.put_attempt(*row)
    _put_spans(queries, loaded)
    for experiment in queues:
        loaded.queues[experiment] = [loaded.put_rollout(row) for row in queries.rows(f"queue {experiment!r}")]
    loaded.numbers = [number for (number,) in queries.rows("numbers")]
    for (data,) in queries.rows("versions"):
        version = decode(data, ResourceVersion)
        loaded.versions[version.name, version.version] = version
    loaded.documents = dict(queries.rows("documents"))
    ((xid,),) = queries.rows("xid")
    return loaded, xid
