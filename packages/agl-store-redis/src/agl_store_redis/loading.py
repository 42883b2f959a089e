"""Begins a transaction: loads the data that its operations need, atomically and in one round trip."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from itertools import count
from typing import Any, TypeAlias

import msgspec

from agl.schemas import AttemptStatus, ResourceVersion, Rollout, Span, decode, rollout_id_of
from agl_store_redis.connections import Server
from agl_store_redis.scripts import call
from agl_store_sqlite.sql.changes import LoadedRows
from agl_store_sqlite.sql.needs import MOST_CLAIMED, Needs, queues_of
from agl_store_sqlite.sql.rows import ATTEMPT_BITS, Row, number_of, read_rollout

HOLD_S = 5
"""Seconds after which a rollout that a transaction took from the queue, but did not claim, is queued again."""

LAPSED = 500
"""Largest number of overdue attempts that one transaction decides."""

Comparison: TypeAlias = tuple[str, str | bytes, str, bytes | int]
"""A kind of key, two names, and the value that the key must have when the transaction ends."""

_Progress: TypeAlias = tuple[int, str, int, int, int, int, float, float]
"""The version, status, attempts, failures, losses, newest attempt, start and end of a rollout."""

_fresh = count(1 << 48)
"""Temporary numbers of new rollouts, until the server numbers them; each is used once."""


@dataclass(kw_only=True)
class Loaded:
    """The rows that a transaction loaded.

    Attributes:
        rows: The rows.
        before: The rollouts as stored, by id; of a damaged one, its id, experiment and number of attempts.
        versions: Versions of the rollouts' progress, by id.
        comparisons: Conditions under which the loaded data is unchanged.
        held: Rollouts that were taken from the queue: their members of the key ``held``, by id.
        is_short: Whether damaged rollouts stood in the queue, in the places of others that can be claimed.
        lapsed: Ids of overdue attempts.
    """

    rows: LoadedRows
    before: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    held: dict[str, str] = field(default_factory=dict[str, str])
    is_short: bool = False
    lapsed: Sequence[str] = ()

    @property
    def is_overdue(self) -> bool:
        """Return true if overdue attempts must be decided before the operations run."""
        return self.rows.next_deadline <= self.rows.now


def begin(server: Server, base: str, needs: Sequence[Needs], *, held: Sequence[str] = (), times: int = 1) -> Loaded:
    """Load the data that operations need; if attempts are overdue, only the clock. redis-py's errors pass through.

    Args:
        server: The connection.
        base: The prefix of all keys.
        needs: The data to load.
        held: Rollouts that an earlier try took from the queue, and that are put back.
        times: Multiplies the number of rollouts that are taken from the queue.
    """
    claim_ids = list(dict.fromkeys(claim_id for need in needs for claim_id in need.claim_ids))
    versions = list(dict.fromkeys(version for need in needs for version in need.versions))
    documents = list(dict.fromkeys(key for need in needs for key in need.documents))
    queues = queues_of(needs)
    request = {
        "held": held,
        "hold_s": HOLD_S,
        "rollouts": list(dict.fromkeys(rollout_id for need in needs for rollout_id in need.rollout_ids)),
        "attempts": list(dict.fromkeys(_place(each) for need in needs for each in need.attempt_ids)),
        "spans": _spans([span for need in needs for span in need.spans]),
        "queues": [(experiment, min(MOST_CLAIMED, limit * times)) for experiment, limit in queues.items()],
        "claims": claim_ids,
        "versions": versions,
    }
    answer = call(server, "begin", base, msgspec.msgpack.encode(request), *documents)
    loaded = Loaded(rows=_clock(answer))
    if loaded.is_overdue:
        return loaded
    _put_rollouts(loaded, answer[3])
    _put_attempts(loaded, answer[4])
    _put_spans(loaded, answer[5], answer[6])
    for experiment, found in zip(queues, answer[7], strict=True):
        ids = loaded.rows.queues[experiment] = [each.decode() for each in found]
        loaded.held |= {each: f"{loaded.before[each].experiment}/{each}" for each in ids if each in loaded.before}
    if damaged := [loaded.held.pop(each) for each in list(loaded.held) if each in loaded.rows.damaged]:
        server.run("ZREM", f"{base}held", *damaged)  # they leave the queue for good
        loaded.is_short = True
    loaded.comparisons += [("c", name, "", size) for name, size in zip(claim_ids, answer[8], strict=True)]
    for (name, version), data in zip(versions, answer[9], strict=True):
        if data is not None:
            loaded.rows.versions[name, version] = decode(data, ResourceVersion)
        loaded.comparisons.append(("v", name, version, int(data is not None)))
    _put_documents(loaded, documents, answer[10])
    loaded.rows.numbers = [next(_fresh) for _ in range(sum(need.new for need in needs))]
    return loaded


def begin_lapsed(server: Server, base: str) -> Loaded:
    """Load overdue attempts, the longest overdue first."""
    none: dict[str, Any] = dict.fromkeys(("held", "rollouts", "attempts", "spans", "queues", "claims", "versions"), ())
    answer = call(server, "begin", base, msgspec.msgpack.encode({**none, "hold_s": HOLD_S, "lapsed": LAPSED}))
    loaded = Loaded(rows=_clock(answer))
    _put_rollouts(loaded, answer[3])
    _put_attempts(loaded, answer[4])
    loaded.lapsed = list(loaded.rows.attempts)
    return loaded


def _place(attempt_id: str) -> tuple[str, int]:
    return rollout_id_of(attempt_id), number_of(attempt_id)


def _spans(spans: Sequence[Span]) -> list[tuple[str, int, list[str]]]:
    """Return the span ids to append, by rollout and number of the attempt."""
    found: dict[tuple[str, int], list[str]] = {}
    for span in spans:
        where = span.rollout_id, number_of(span.attempt_id) if span.attempt_id else 0
        found.setdefault(where, []).append(span.span_id)
    return [(*where, ids) for where, ids in found.items()]


def _clock(answer: Sequence[bytes]) -> LoadedRows:
    now, deadline = int(answer[0]) + int(answer[1]) / 1e6, answer[2]
    return LoadedRows(now=now, next_deadline=float(deadline) if deadline else math.inf)


def _put_rollouts(loaded: Loaded, rows: Sequence[tuple[bytes, bytes, bytes, bytes, bytes, int]]) -> None:
    for name, number, progress, data, experiment, attempts in rows:
        rollout_id = name.decode()
        loaded.comparisons.append(("p", rollout_id, "", progress))
        if number:
            loaded.versions[rollout_id], row = _row(rollout_id, int(number), progress, data)
            loaded.rows.put_rollout(row)
            loaded.before[rollout_id] = loaded.rows.rollouts.get(rollout_id) or Rollout(
                rollout_id=rollout_id, task=None, experiment=experiment.decode(), attempts=attempts
            )


def _put_attempts(loaded: Loaded, rows: Sequence[tuple[bytes, bytes | int, bytes]]) -> None:
    for name, number, data in rows:
        rollout_id = name.decode()
        loaded.rows.put_attempt(rollout_id, int(number), status_of(loaded.before[rollout_id], int(number)), data)
        loaded.comparisons.append(("a", rollout_id, str(int(number)), _digest(data)))


def status_of(rollout: Rollout, number: int) -> AttemptStatus:
    """Return the status of an attempt as far as its rollout shows it, for an attempt that cannot be read."""
    return "lost" if rollout.status == "queued" or number != rollout.attempts else rollout.status


def _put_spans(loaded: Loaded, counts: Sequence[Any], kept: Sequence[Any]) -> None:
    for name, number, size, last in counts:
        rollout_id = name.decode()
        loaded.comparisons.append(("s", f"{rollout_id}/{number}", "", size))
        if (seq := loaded.rows.seqs.get(rollout_id)) is not None:
            loaded.rows.last[seq << ATTEMPT_BITS | number] = last
    for name, number, span_id in kept:
        if (seq := loaded.rows.seqs.get(name.decode())) is not None:
            loaded.rows.kept.add((seq << ATTEMPT_BITS | number, span_id.decode()))


def _put_documents(loaded: Loaded, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            loaded.rows.documents[key] = value
        loaded.comparisons.append(("d", key, "", b"" if value is None else _digest(value)))


def _digest(data: bytes) -> bytes:
    return sha1(data, usedforsecurity=False).hexdigest().encode()


def read_stored(rollout_id: str, number: int, progress: bytes, data: bytes) -> Rollout:
    """Read a rollout from its parts; raises :class:`~agl.errors.NotFoundError` if they are damaged."""
    return read_rollout(_row(rollout_id, number, progress, data)[1])


def _row(rollout_id: str, number: int, progress: bytes, data: bytes) -> tuple[int, Row]:
    """Return the version of a rollout's progress, and the row that :func:`read_rollout` reads."""
    try:
        version, status, *counts, attempt, started_at, finished_at = msgspec.msgpack.decode(progress, type=_Progress)
    except msgspec.DecodeError:
        version, status, *counts, attempt, started_at, finished_at = 0, "damaged", 0, 0, 0, 0, 0.0, 0.0
    return version, (number, rollout_id, status, *counts, attempt or None, started_at, finished_at, data)
