"""The rows that a transaction of a server's store loads when it begins, and the changes that it writes when it ends."""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from agl.contracts import Statistics
from agl.errors import NotFoundError
from agl.schemas import Attempt, AttemptStatus, ResourceVersion, Rollout
from agl_store_sqlite.sql.rows import NUMBER_MASK, Row, read_attempt, read_rollout

SpanRow: TypeAlias = tuple[int, int, str, bytes]
"""A packed span: the attempt's number, the sequence number, the id and the bytes."""

AttemptRow: TypeAlias = tuple[str, str, float, bytes]
"""An attempt: the status, the claim id, the deadline and the record."""

MetricKey: TypeAlias = tuple[str, int, str, int, str]
"""The experiment, run, algorithm, step and name of a metric."""

MetricRow: TypeAlias = tuple[int | None, float, float]
"""The step of the experiment, the value and the time of a metric."""

FeedRow: TypeAlias = tuple[int | None, str, str, str | None]
"""An entry of the change feed: the attempt's number, the kind, the status and the resource's name."""


@dataclass(kw_only=True)
class LoadedRows:
    """The rows that a transaction read at its start; it locks them, or compares them again at its end.

    Attributes:
        now: The server's clock, in Unix seconds; leases and time limits follow it.
        next_deadline: Time at which the next running attempt lapses; infinity if none runs.
        damaged: Errors of the rollouts that cannot be read, by id.
        seqs: Numbers of the rollouts, damaged ones included, by id.
        last: The last sequence of each attempt to append to, by the attempt's number.
        kept: Spans to append that are stored already, by the attempt's number and the span's id.
        queues: The oldest queued rollouts of each requested experiment.
        numbers: Fresh numbers for rollouts to add, which no other transaction uses.
    """

    now: float = 0.0
    next_deadline: float = math.inf
    rollouts: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    damaged: dict[str, NotFoundError] = field(default_factory=dict[str, NotFoundError])
    seqs: dict[str, int] = field(default_factory=dict[str, int])
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    last: dict[int, int] = field(default_factory=dict[int, int])
    kept: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    queues: dict[str | None, list[str]] = field(default_factory=dict[str | None, list[str]])
    numbers: list[int] = field(default_factory=list[int])
    versions: dict[tuple[str, str], ResourceVersion] = field(default_factory=dict[tuple[str, str], ResourceVersion])
    documents: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    def put_rollout(self, row: Row) -> str:
        """Add a rollout that was read, replacing an earlier state of it; return the rollout's id."""
        seq, rollout_id, *_ = row
        self.seqs[rollout_id] = seq
        try:
            self.rollouts[rollout_id] = read_rollout(row)
        except NotFoundError as error:
            self.damaged[rollout_id] = error
        return rollout_id

    def put_attempt(self, rollout_id: str, key: int, status: AttemptStatus, data: bytes) -> None:
        """Add an attempt that was read, replacing an earlier state of it."""
        attempt = read_attempt(data, rollout_id, number=key & NUMBER_MASK, status=status)
        self.attempts[attempt.attempt_id] = attempt


@dataclass(kw_only=True)
class Changes:
    """The changes that a transaction writes.

    Attributes:
        added: New rollouts with their numbers.
        rollouts: Changed rollouts, by number.
        attempts: Changed attempts, by number; ``None`` removes one.
        documents: Changed documents, by key; ``None`` removes one.
        feed: New entries of the change feed, in order.
        shares: Shares of rollouts to add to statistics; negative ones remove rollouts.
        removed: Numbers of rollouts to remove with their attempts, spans and changes.
        has_queued: Whether a rollout was queued, so that waiting claims must look.
        soonest: The earliest deadline that was set; infinity if none was.
    """

    added: list[tuple[int, Rollout]] = field(default_factory=list[tuple[int, Rollout]])
    rollouts: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    attempts: dict[int, AttemptRow | None] = field(default_factory=dict[int, AttemptRow | None])
    spans: list[SpanRow] = field(default_factory=list[SpanRow])
    versions: list[tuple[str, str, bytes]] = field(default_factory=list[tuple[str, str, bytes]])
    documents: dict[bytes, bytes | None] = field(default_factory=dict[bytes, bytes | None])
    metrics: dict[MetricKey, MetricRow] = field(default_factory=dict[MetricKey, MetricRow])
    feed: list[FeedRow] = field(default_factory=list[FeedRow])
    removed: list[int] = field(default_factory=list[int])
    shares: list[Statistics] = field(default_factory=list[Statistics])
    has_queued: bool = False
    soonest: float = math.inf

    @property
    def is_heard(self) -> bool:
        """Return true if waiting callers need a message about these changes."""
        return bool(self.feed) or self.has_queued or self.soonest < math.inf

    @property
    def message(self) -> str:
        """The message about these changes to waiting callers on all machines; see :func:`read_message`."""
        return f"{'q' if self.has_queued else ''}{'f' if self.feed else ''} {self.soonest!r}"
