"""How the durable stores number what they keep, and how a rollout comes out of its row.

A rollout has a number (``seq``, never used again) and its attempts are ``seq << 8 | number``, with number 0 for what
belongs to no attempt. What belongs together therefore lies together.
"""

from typing import Any, TypeAlias

from msgspec.structs import force_setattr

from agl.schemas import Rollout
from agl.schemas import _codec as codec
from agl.schemas._ids import attempt_id_of

Row: TypeAlias = tuple[Any, ...]
"""One row of a table, as a database driver gives it."""

ATTEMPT_BITS = 8
NUMBER_MASK = (1 << ATTEMPT_BITS) - 1

SEQUENCE_BITS = 24
MAX_SEQUENCE = (1 << SEQUENCE_BITS) - 1

ROLLOUT = "r.seq, r.status, r.attempts, r.attempt, r.started_at, r.finished_at, r.data"
"""The columns that :func:`read_rollout` reads; ``data`` is the rollout as it was queued."""


def read_rollout(row: Row) -> Rollout:
    """A rollout from the columns of :data:`ROLLOUT`."""
    _, status, attempts, attempt, started_at, finished_at, data = row
    rollout = codec.decode(data, Rollout)
    force_setattr(rollout, "status", status)
    force_setattr(rollout, "attempts", attempts)
    force_setattr(rollout, "attempt_id", attempt and attempt_id_of(rollout.rollout_id, attempt & NUMBER_MASK))
    force_setattr(rollout, "started_at", started_at)
    force_setattr(rollout, "finished_at", finished_at)
    return rollout


def number_of(attempt_id: str) -> int:
    """The number in an attempt's id; 0 for ids that no attempt can have."""
    digits = attempt_id.rpartition(".")[2]
    number = int(digits) if digits.isdecimal() and len(digits) <= 3 else 0
    return number if number <= NUMBER_MASK and str(number) == digits else 0
