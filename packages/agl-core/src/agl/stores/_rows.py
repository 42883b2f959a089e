"""How stores number what they keep, and how rollouts, changes and spans become rows and come out of them.

A rollout has a number (``seq``, never used again) and its attempts are ``seq << 8 | number``, with number 0 for what
belongs to no attempt. What belongs together therefore lies together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec.structs import force_setattr, replace

from agl.contracts import Change
from agl.errors import StoreError
from agl.schemas import Rollout, Span
from agl.schemas import _codec as codec
from agl.schemas._ids import attempt_id_of
from agl.stores._packing import Packer

Row: TypeAlias = tuple[Any, ...]

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


def progress_row(rollout: Rollout, seq: int) -> Row:
    """Status, attempts, attempt, start, end and stage of a rollout, and its number.

    The stage is ``open`` while the rollout is queued or running, and its status after that.
    """
    attempt = rollout.attempt_id and seq << ATTEMPT_BITS | rollout.attempts  # always the newest one
    stage = rollout.status if rollout.is_finished else "open"
    return rollout.status, rollout.attempts, attempt, rollout.started_at, rollout.finished_at, stage, seq


def read_change(row: Row) -> Change:
    """A change from cursor, kind, status, name, attempt, rollout id and experiment."""
    cursor, kind, status, name, attempt, rollout_id, experiment = row
    if kind == "resource":
        return Change(cursor=cursor, kind=kind, key=name, status=status)
    number = attempt & NUMBER_MASK
    attempt_id = attempt_id_of(rollout_id, number) if number else ""
    return Change(cursor=cursor, kind=kind, key=rollout_id, attempt_id=attempt_id, status=status, experiment=experiment)


def number_of(attempt_id: str) -> int:
    """The number in an attempt's id; 0 for ids that no attempt can have."""
    digits = attempt_id.rpartition(".")[2]
    number = int(digits) if digits.isdecimal() and len(digits) <= 3 else 0
    return number if number <= NUMBER_MASK and str(number) == digits else 0


@dataclass(kw_only=True)
class Place:
    """Where the spans of an attempt go.

    Attributes:
        key: The attempt's number, or what else the store knows it by.
        last: The last sequence that is there.
        is_late: Whether the attempt is decided.
        has: Whether a span of that id is there.
    """

    key: Any
    last: int
    is_late: bool
    has: Callable[[str], bool]


def place_spans(
    spans: Sequence[Span], packer: Packer, find: Callable[[Span], Place]
) -> list[tuple[Any, int, str, bytes]]:
    """The rows of those spans that are not there: attempt's number, sequence, span id, and the packed span.

    All are packed before the first is kept, so that one that cannot be packed leaves no trace.
    """
    rows: dict[tuple[Any, str], tuple[Any, int, str, bytes]] = {}
    places: dict[tuple[str, str], Place] = {}
    try:
        for span in spans:
            where = span.rollout_id, span.attempt_id
            place = places.get(where) or places.setdefault(where, find(span))
            if (place.key, span.span_id) in rows or place.has(span.span_id):
                continue
            place.last = max(span.sequence, place.last + 1)
            if place.last > MAX_SEQUENCE:
                raise StoreError(
                    f"attempt {span.attempt_id!r} has no room for sequence {place.last}, above {MAX_SEQUENCE}"
                )
            marked = span if span.is_late == place.is_late else replace(span, is_late=place.is_late)
            packed = packer.pack(marked, attempt=place.key, sequence=place.last)
            rows[place.key, span.span_id] = place.key, place.last, span.span_id, packed
    except StoreError:
        packer.clear()  # what it remembers of these is not kept
        raise
    return list(rows.values())
