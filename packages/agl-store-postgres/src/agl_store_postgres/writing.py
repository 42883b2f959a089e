"""Ends a transaction: writes all changes of its operations and commits them, in one or two round trips.

The change feed has one total order: cursors are taken last, under one lock that PostgreSQL releases after the commit
is visible, so a reader that sees a cursor sees all smaller ones. Statement, commit and release are sent together, so
no machine holds the lock while it waits for the network.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agl.contracts import Statistics
from agl.schemas import Rollout, encode
from agl_store_postgres.connections import Connection
from agl_store_postgres.partitions import Partitions
from agl_store_sqlite.sql.changes import Changes
from agl_store_sqlite.sql.rows import ATTEMPT_BITS, progress_row
from agl_store_sqlite.sql.statistics import STATISTICS, additions, merging, statistics_row

_FEED_LOCK = 0x41474C00 << 32
"""The upper half of the number of the feed's lock.

The lower half is the feed's object number, so each store has its own lock.
"""

_ADD_ROLLOUTS = (
    b"COPY rollouts (seq, rollout_id, experiment, mode, group_id, status, stage, attempts, attempt, started_at, "
    b"finished_at, created_at, data) FROM STDIN (FORMAT BINARY)"
)
_ADD_PLACED = _ADD_ROLLOUTS.replace(b"data)", b"data, shard)")
_ROLLOUT_TYPES = ("int8", *["text"] * 6, "int4", "int8", "float8", "float8", "float8", "bytea", "int2")
_ADD_SPANS = b"COPY spans (attempt, sequence, span_id, data) FROM STDIN (FORMAT BINARY)"
_SPAN_TYPES = ("int8", "int4", "text", "bytea")
_SAVE_ROLLOUTS = (
    b"UPDATE rollouts r SET status = v.status, attempts = v.attempts, failures = v.failures, losses = v.losses, "
    b"attempt = v.attempt, stage = v.stage, started_at = v.started_at, finished_at = v.finished_at "
    b"FROM unnest(%s::text[], %s::int[], %s::int[], %s::int[], %s::bigint[], %s::float8[], %s::float8[], %s::text[], "
    b"%s::bigint[]) AS v(status, attempts, failures, losses, attempt, started_at, finished_at, stage, seq) "
    b"WHERE r.seq = v.seq"
)
_SAVE_ATTEMPTS = (
    b"INSERT INTO attempts SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::float8[], %b::bytea[]) "
    b"ON CONFLICT (id) DO UPDATE SET status = excluded.status, claim_id = excluded.claim_id, "
    b"deadline = excluded.deadline, data = excluded.data"
)
_DROP_ATTEMPTS = b"DELETE FROM attempts WHERE id = ANY(%s::bigint[])"
_SAVE_MARKS = (
    b"INSERT INTO span_marks SELECT * FROM unnest(%s::bigint[], %s::int[]) ON CONFLICT (attempt) "
    b"DO UPDATE SET last = excluded.last"
)
_ADD_VERSIONS = b"INSERT INTO versions (name, version, data) VALUES (%s, %s, %b)"
_SAVE_DOCUMENTS = (
    b"INSERT INTO documents SELECT * FROM unnest(%b::bytea[], %b::bytea[]) ON CONFLICT (key) "
    b"DO UPDATE SET value = excluded.value"
)
_DROP_DOCUMENTS = b"DELETE FROM documents WHERE key = ANY(%b::bytea[])"
_SAVE_METRICS = (
    b"INSERT INTO metrics (experiment, run, algorithm, step, name, experiment_step, value, time) "
    b"SELECT * FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::float8[], "
    b"%s::float8[]) ON CONFLICT (experiment, run, algorithm, step, name) "
    b"DO UPDATE SET experiment_step = excluded.experiment_step, value = excluded.value, time = excluded.time"
)
_ADD_STATISTICS = (
    f"INSERT INTO statistics AS s ({STATISTICS}) SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[], "
    "%s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::float8[], %s::bigint[], %s::bigint[], %s::bigint[], "
    f"%s::bigint[], %s::float8[], %s::float8[]) {merging('greatest')}"
).encode()
_ADD_CHANGES = (
    b"INSERT INTO changes (attempt, kind, status, name) SELECT attempt, kind, status, name "
    b"FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[]) WITH ORDINALITY "
    b"AS v(attempt, kind, status, name, at) ORDER BY at"
)


def _for_rollouts(*statements: str) -> tuple[bytes, ...]:
    """Return statements with ``SEQS`` replaced by a list of rollout numbers, and ``BITS`` by the bits of an attempt."""
    seqs, bits = "unnest(%s::bigint[]) AS v(seq)", str(ATTEMPT_BITS)
    return tuple(statement.replace("SEQS", seqs).replace("BITS", bits).encode() for statement in statements)


_OF_ROLLOUT = "DELETE FROM {0} t USING SEQS WHERE t.{1} >= v.seq << BITS AND t.{1} < (v.seq + 1) << BITS"
_REMOVE_SPANS = _for_rollouts(_OF_ROLLOUT.format("spans", "attempt"))
_REMOVE_LATER = _for_rollouts("INSERT INTO removals SELECT v.seq, 0 FROM SEQS")
"""Notes rollouts whose spans are removed later, in a store in which a whole partition may be dropped instead."""
_REMOVE_PLACED = _for_rollouts(
    _OF_ROLLOUT.format("span_marks", "attempt"),
    # the spans themselves go later, because no transaction is on two servers
    "INSERT INTO removals SELECT r.seq, r.shard FROM rollouts r JOIN SEQS ON r.seq = v.seq",
)
_REMOVE = _for_rollouts(
    _OF_ROLLOUT.format("attempts", "id"),
    # keep the newest cursor, so that cursors never decrease
    "UPDATE changes SET attempt = NULL, kind = 'gone' FROM SEQS "
    "WHERE cursor = (SELECT max(cursor) FROM changes) AND attempt >> BITS = v.seq",
    _OF_ROLLOUT.format("changes", "attempt"),
    "DELETE FROM rollouts r USING SEQS WHERE r.seq = v.seq",
)


def commit(
    db: Connection,
    changes: Changes,
    *,
    feed: int,
    place: Callable[[str], int] | None = None,
    partitions: Partitions | None = None,
) -> None:
    """Write all changes and commit; psycopg's errors pass through.

    Args:
        db: The connection, in a transaction.
        changes: The changes.
        feed: The number of the store's change feed.
        place: In a store with shards, returns a new rollout's shard by its id; the spans are on the shards already.
        partitions: The partitions of the table of spans, if it has any.
    """
    _add(db, changes, place, partitions)
    with db.pipeline():
        if changes.spans and place is not None:
            db.execute(_SAVE_MARKS, _columns(sorted({row[0]: row[1] for row in changes.spans}.items())))
        _save(db, changes)
        if changes.feed or changes.shares:
            db.execute(b"SELECT pg_advisory_xact_lock(%s::bigint)", (_FEED_LOCK | feed,))
        for shares in additions(changes.shares):  # under the lock, because many machines add to one row
            add_statistics(db, shares)
        if changes.feed:
            db.execute(_ADD_CHANGES, _columns(changes.feed))
        if changes.removed:  # last, because other changes may concern these rollouts
            remove_spans = _REMOVE_SPANS if partitions is None else _REMOVE_LATER
            for statement in (*(remove_spans if place is None else _REMOVE_PLACED), *_REMOVE):
                db.execute(statement, (changes.removed,))
        if changes.is_heard:
            db.execute(b"SELECT pg_notify(%s, %s)", (channel_of(feed), changes.message))
        db.execute(b"COMMIT")


def _add(db: Connection, changes: Changes, place: Callable[[str], int] | None, partitions: Partitions | None) -> None:
    rows = [_new_row(seq, rollout) for seq, rollout in changes.added]
    if rows and place is not None:
        _copy(db, _ADD_PLACED, _ROLLOUT_TYPES, [(*row, place(row[1])) for row in rows])
    elif rows:
        _copy(db, _ADD_ROLLOUTS, _ROLLOUT_TYPES[:-1], rows)
    if changes.spans and place is None:
        add_spans(db, changes.spans, partitions)


def add_spans(db: Connection, rows: Sequence[tuple[Any, ...]], partitions: Partitions | None) -> None:
    """Write packed spans; missing partitions are made first."""
    if partitions is not None:
        partitions.make(db, [row[0] for row in rows])
    _copy(db, _ADD_SPANS, _SPAN_TYPES, rows)


def remove_spans(db: Connection, seqs: Sequence[int]) -> None:
    """Remove the spans of rollouts, by the rollouts' numbers."""
    for statement in _REMOVE_SPANS:
        db.execute(statement, (list(seqs),))


def channel_of(feed: int) -> str:
    """Return the channel on which a store announces its changes."""
    return f"agl_{feed}"


def _save(db: Connection, changes: Changes) -> None:
    if changes.rollouts:
        db.execute(_SAVE_ROLLOUTS, _columns([progress_row(rollout, seq) for seq, rollout in changes.rollouts.items()]))
    kept = [(key, *row) for key, row in changes.attempts.items() if row is not None]
    if kept:
        db.execute(_SAVE_ATTEMPTS, _columns(kept))
    if len(kept) < len(changes.attempts):
        db.execute(_DROP_ATTEMPTS, ([key for key, row in changes.attempts.items() if row is None],))
    for version in changes.versions:
        db.execute(_ADD_VERSIONS, version)
    documents = sorted(changes.documents.items())  # in one order, so that two writers never wait for each other
    if dropped := [key for key, value in documents if value is None]:
        db.execute(_DROP_DOCUMENTS, (dropped,))
    if saved := [pair for pair in documents if pair[1] is not None]:
        db.execute(_SAVE_DOCUMENTS, _columns(saved))
    if changes.metrics:
        db.execute(_SAVE_METRICS, _columns([(*key, *value) for key, value in sorted(changes.metrics.items())]))


def add_statistics(db: Connection, shares: Sequence[Statistics]) -> None:
    """Add counts and sums of rollouts to the statistics of their steps; ``shares`` has one per step and mode."""
    if shares:
        db.execute(_ADD_STATISTICS, _columns([statistics_row(share) for share in shares]))


def _copy(db: Connection, statement: bytes, types: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    with db.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Transpose rows into columns."""
    return [list(column) for column in zip(*rows, strict=True)]


def _new_row(seq: int, rollout: Rollout) -> tuple[Any, ...]:
    where = (rollout.rollout_id, rollout.experiment, rollout.mode, rollout.group_id)
    return seq, *where, "queued", "open", 0, None, 0.0, 0.0, rollout.created_at, encode(rollout)
