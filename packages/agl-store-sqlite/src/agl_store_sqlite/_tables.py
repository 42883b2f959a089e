"""The tables of the SQLite store, over one connection inside a transaction."""

import heapq
import math
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec.structs import replace

from agl.contracts import Metric, Statistics
from agl.errors import NotFoundError
from agl.schemas import Attempt, Claim, ResourceVersion, Rollout, Span, decode, encode, rollout_id_of, to_json
from agl.stores import MAX_SEQUENCE, deadline
from agl_store_sqlite.sql.packing import AttemptSpans, Packer, place_spans
from agl_store_sqlite.sql.rows import (
    ATTEMPT_BITS,
    NUMBER_MASK,
    ROLLOUT,
    SEQUENCE_BITS,
    Row,
    number_of,
    progress_row,
    read_attempt,
    read_rollout,
    read_rollouts,
)
from agl_store_sqlite.sql.statistics import STATISTICS, additions, merging, statistics_row

_INSERT_CHANGES = "INSERT INTO changes (attempt, kind, status) VALUES (?, ?, ?)"
_KEEP_LAST_CURSOR = (  # so that cursors never go back
    "UPDATE changes SET attempt = NULL, kind = 'gone' "
    "WHERE cursor = (SELECT max(cursor) FROM changes) AND attempt BETWEEN ? AND ?"
)
_UPDATE_ROLLOUT = (
    "UPDATE rollouts SET status = ?, attempts = ?, failures = ?, losses = ?, attempt = ?, started_at = ?, "
    "finished_at = ?, stage = ? WHERE seq = ?"
)
_SAVE_ATTEMPT = (
    "INSERT INTO attempts VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET status = excluded.status, "
    "claim_id = excluded.claim_id, deadline = excluded.deadline, data = excluded.data"
)
_START_ROLLOUTS = (  # leaves the stage alone, and so the index of rollouts by stage
    f"UPDATE rollouts SET status = 'running', attempts = attempts + 1, attempt = seq << {ATTEMPT_BITS} | attempts + 1, "
    "started_at = CASE started_at WHEN 0.0 THEN ? ELSE started_at END "
    "WHERE seq IN (SELECT value FROM json_each(?))"
)
_LOG_STARTED = (
    "INSERT INTO changes (attempt, kind, status) SELECT r.attempt, 'rollout', 'running' "
    "FROM json_each(?) AS claimed CROSS JOIN rollouts r ON r.seq = claimed.value ORDER BY claimed.key"
)
_PLACE = (
    f"SELECT r.seq << {ATTEMPT_BITS} | ?, a.status FROM rollouts r "
    f"LEFT JOIN attempts a ON a.id = r.seq << {ATTEMPT_BITS} | ? WHERE r.rollout_id = ?"
)
_ADD_STATISTICS = f"INSERT INTO statistics AS s ({STATISTICS}) VALUES ({', '.join('?' * 14)}) {merging('max')}"
_IS_KEPT = f"SELECT 1 FROM spans WHERE key >> {SEQUENCE_BITS} = ? AND span_id = ?"


class SQLiteTables:
    """Implements :class:`agl.stores.Tables` for one transaction.

    Attributes:
        has_queued: Whether a rollout was queued.
        has_changed: Whether the change feed grew.
    """

    def __init__(self, connection: sqlite3.Connection, packer: Packer, *, now: float) -> None:
        self.now = now
        self._db = connection
        self._packer = packer
        self._seqs: dict[str, int] = {}
        self._shares: list[Statistics] = []
        self.has_queued = False
        self.has_changed = False

    def rollout(self, rollout_id: str) -> Rollout | None:
        row = self._db.execute(f"SELECT {ROLLOUT} FROM rollouts r WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return row and self._rollout(row)

    def held(self, attempt_id: str) -> Claim | None:
        row = self._db.execute(
            f"SELECT {ROLLOUT}, a.id, a.status, a.data FROM rollouts r "
            f"JOIN attempts a ON a.id = r.seq << {ATTEMPT_BITS} | ? WHERE r.rollout_id = ?",
            (number_of(attempt_id), rollout_id_of(attempt_id)),
        ).fetchone()
        return row and self._claim(row)

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        names = self._queued_experiments() if experiment is None else [experiment]
        sql = f"SELECT {ROLLOUT} FROM rollouts r WHERE status = 'queued' AND experiment = ? ORDER BY seq"
        oldest_first = heapq.merge(*(self._db.execute(sql, (name,)) for name in names))  # rows begin with seq
        return list(islice(read_rollouts(oldest_first, self._rollout), limit))

    def _queued_experiments(self) -> list[str]:
        """Return the names of experiments with queued rollouts, by skipping from name to name in the index."""
        rows = self._db.execute(
            """WITH RECURSIVE names(name) AS (
                SELECT min(experiment) FROM rollouts WHERE status = 'queued'
                UNION ALL
                SELECT (SELECT min(experiment) FROM rollouts WHERE status = 'queued' AND experiment > name)
                FROM names WHERE name IS NOT NULL)
            SELECT name FROM names WHERE name IS NOT NULL"""
        )
        return [name for (name,) in rows]

    def claimed(self, claim_id: str) -> list[Claim]:
        return self._claims("a.claim_id <> '' AND a.claim_id = ? ORDER BY a.id", claim_id)

    def overdue(self) -> list[Claim]:
        return self._claims("a.deadline <= ? ORDER BY a.deadline, a.id", self.now)

    def is_running(self, rollout_id: str) -> bool:
        low = self._key(rollout_id, 0)
        sql = "SELECT 1 FROM attempts WHERE status = 'running' AND id BETWEEN ? AND ?"
        return self._db.execute(sql, (low, low | NUMBER_MASK)).fetchone() is not None

    def bound_leases(self) -> None:
        """Shorten running leases that would last longer than their length because the clock was set back."""
        running = self._claims("a.deadline > ? ORDER BY a.id", self.now)
        bounded = [replace(claim, attempt=_bounded(claim.attempt, self.now)) for claim in running]
        self.save([new for new, old in zip(bounded, running, strict=True) if new != old], is_logged=False)

    def _claims(self, condition: str, value: object) -> list[Claim]:
        """Return the running attempts that meet a condition."""
        rows = self._db.execute(
            f"SELECT {ROLLOUT}, a.id, a.status, a.data FROM attempts a "
            f"JOIN rollouts r ON r.seq = a.id >> {ATTEMPT_BITS} WHERE a.status = 'running' AND {condition}",
            (value,),
        )
        claims: list[Claim] = []
        for row in rows.fetchall():
            try:
                claims.append(self._claim(row))
            except NotFoundError:  # the deadline of a damaged rollout would end every transaction
                self._db.execute("UPDATE attempts SET status = 'lost' WHERE id = ?", (row[-3],))
        return claims

    def add(self, rollouts: Sequence[Rollout]) -> None:
        if not rollouts:
            return
        self._db.executemany(
            "INSERT INTO rollouts (rollout_id, experiment, mode, group_id, status, stage, attempts, started_at, "
            "finished_at, created_at, data) VALUES (?, ?, ?, ?, 'queued', 'open', 0, 0.0, 0.0, ?, ?)",
            [(r.rollout_id, r.experiment, r.mode, r.group_id, r.created_at, encode(r)) for r in rollouts],
        )
        (last,) = self._db.execute("SELECT max(seq) FROM rollouts").fetchone()
        first = last - len(rollouts) + 1
        self._seqs.update((rollout.rollout_id, first + at) for at, rollout in enumerate(rollouts))
        self._log(rollouts)

    def save(self, claims: Sequence[Claim], *, is_logged: bool = True) -> None:
        self._db.executemany(_SAVE_ATTEMPT, map(self._attempt_row, claims))
        decided = [claim for claim in claims if claim.attempt.status != "running"]
        for claim in decided:
            self._packer.forget(self._key(claim.rollout.rollout_id, claim.attempt.number))
        if is_logged:
            self._update([claim.rollout for claim in decided])
            self._start([claim for claim in claims if claim.attempt.status == "running"])

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            unseen = self._key(rollout.rollout_id, rollout.attempts + 1)
            self._db.execute("DELETE FROM attempts WHERE id BETWEEN ? AND ?", (unseen, unseen | NUMBER_MASK))
            self._packer.forget(unseen)
        self._update(rollouts)

    def _update(self, rollouts: Sequence[Rollout]) -> None:
        if rollouts:
            rows = [progress_row(rollout, self._seqs[rollout.rollout_id]) for rollout in rollouts]
            self._db.executemany(_UPDATE_ROLLOUT, rows)
            self._log(rollouts)

    def _start(self, claims: Sequence[Claim]) -> None:
        """Update and log the rollouts of attempts that were just started; all attempts have the same start time."""
        if claims:
            seqs = to_json([self._seqs[claim.rollout.rollout_id] for claim in claims]).decode()
            self._db.execute(_START_ROLLOUTS, (claims[0].attempt.started_at, seqs))
            self._db.execute(_LOG_STARTED, (seqs,))
            self.has_changed = True

    def insert_spans(self, spans: Sequence[Span]) -> list[Span]:
        rows, new = place_spans(spans, self._packer, self._attempt_spans)
        keyed = [(key << SEQUENCE_BITS | sequence, span_id, data) for key, sequence, span_id, data in rows]
        self._db.executemany("INSERT INTO spans VALUES (?, ?, ?)", keyed)
        self._db.executemany(
            f"INSERT INTO changes (attempt, kind, status) SELECT ?, 'spans', status FROM rollouts "
            f"WHERE seq = ? >> {ATTEMPT_BITS}",
            [(key, key) for key in dict.fromkeys(row[0] for row in rows)],
        )
        self.has_changed |= bool(rows)
        return new

    def add_statistics(self, shares: Sequence[Statistics]) -> None:
        self._shares += shares

    def write_statistics(self) -> None:
        """Write the statistics that :meth:`add_statistics` collected; called at the end of the transaction."""
        if self._shares:
            for shares in additions(self._shares):
                add_statistics(self._db, shares)

    def _attempt_spans(self, span: Span) -> AttemptSpans:
        number = number_of(span.attempt_id) if span.attempt_id else 0
        key, status = self._db.execute(_PLACE, (number, number, span.rollout_id)).fetchone()
        (last,) = self._db.execute("SELECT max(key) FROM spans WHERE key BETWEEN ? AND ?", span_range(key)).fetchone()

        def has(span_id: str) -> bool:
            return last is not None and self._db.execute(_IS_KEPT, (key, span_id)).fetchone() is not None

        return AttemptSpans(key=key, last=(last or 0) & MAX_SEQUENCE, is_late=status not in (None, "running"), has=has)

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            low = self._key(rollout.rollout_id, 0)
            high = low | NUMBER_MASK
            self._db.execute("DELETE FROM spans WHERE key BETWEEN ? AND ?", (span_range(low)[0], span_range(high)[1]))
            self._db.execute("DELETE FROM attempts WHERE id BETWEEN ? AND ?", (low, high))
            self._db.execute(_KEEP_LAST_CURSOR, (low, high))
            self._db.execute("DELETE FROM changes WHERE attempt BETWEEN ? AND ?", (low, high))
            self._db.execute("DELETE FROM rollouts WHERE seq = ?", (low >> ATTEMPT_BITS,))

    def version(self, name: str, version: str) -> ResourceVersion | None:
        row = self._db.execute("SELECT data FROM versions WHERE name = ? AND version = ?", (name, version)).fetchone()
        return row and decode(row[0], ResourceVersion)

    def add_version(self, version: ResourceVersion) -> None:
        row = (version.name, version.version, encode(version))
        self._db.execute("INSERT INTO versions (name, version, data) VALUES (?, ?, ?)", row)
        self._db.execute(
            "INSERT INTO changes (kind, status, name) VALUES ('resource', ?, ?)", (version.version, version.name)
        )
        self.has_changed = True

    def log_metrics(self, metrics: Sequence[Metric]) -> None:
        rows = [(m.experiment, m.run, m.algorithm, m.step, m.name, m.experiment_step, m.value, m.time) for m in metrics]
        self._db.executemany("REPLACE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def get(self, key: bytes) -> bytes | None:
        row = self._db.execute("SELECT value FROM documents WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def put(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._db.executemany("REPLACE INTO documents VALUES (?, ?)", pairs)

    def delete(self, keys: Iterable[bytes]) -> None:
        self._db.executemany("DELETE FROM documents WHERE key = ?", ((key,) for key in keys))

    def _rollout(self, row: Row) -> Rollout:
        self._seqs[row[1]] = row[0]
        return read_rollout(row)

    def _claim(self, row: Row) -> Claim:
        *of, attempt, status, data = row
        rollout = self._rollout(tuple(of))
        found = read_attempt(data, rollout.rollout_id, number=attempt & NUMBER_MASK, status=status)
        return Claim(rollout=rollout, attempt=found)

    def _key(self, rollout_id: str, number: int) -> int:
        """Return the key of an attempt of a rollout that this transaction has read."""
        return self._seqs[rollout_id] << ATTEMPT_BITS | number

    def _attempt_row(self, claim: Claim) -> Row:
        attempt = claim.attempt
        key = self._key(claim.rollout.rollout_id, attempt.number)
        return key, attempt.status, attempt.claim_id, deadline(claim), encode(attempt)

    def _log(self, rollouts: Sequence[Rollout]) -> None:
        """Append the rollouts' present states to the change feed."""
        rows = [(self._key(r.rollout_id, r.attempts if r.attempt_id else 0), "rollout", r.status) for r in rollouts]
        self._db.executemany(_INSERT_CHANGES, rows)
        self.has_changed |= bool(rows)
        self.has_queued |= any(rollout.status == "queued" for rollout in rollouts)


def _bounded(attempt: Attempt, now: float) -> Attempt:
    """Limit an attempt's start to ``now``, and its lease to ``now`` plus the lease's length, if that is known."""
    until = min(attempt.lease_until, now + attempt.lease_s) if attempt.lease_s else attempt.lease_until
    return replace(attempt, lease_until=until, started_at=min(attempt.started_at, now))


def add_statistics(connection: sqlite3.Connection, shares: Sequence[Statistics]) -> None:
    """Add counts and sums of rollouts to the stored statistics of their steps, within a transaction."""
    connection.executemany(_ADD_STATISTICS, map(statistics_row, shares))


def span_range(attempt: int) -> tuple[int, int]:
    """Return the lowest and the highest key that a span of an attempt can have."""
    return attempt << SEQUENCE_BITS, attempt << SEQUENCE_BITS | MAX_SEQUENCE


def next_deadline(connection: sqlite3.Connection) -> float:
    """Return the time at which the next running attempt lapses, in Unix seconds; infinity if none runs."""
    (deadline,) = connection.execute("SELECT min(deadline) FROM attempts WHERE status = 'running'").fetchone()
    return math.inf if deadline is None else float(deadline)
