"""Numbers and packs the spans of an attempt that a store does not have yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agl.errors import StoreError
from agl.schemas import Span
from agl.stores import placed
from agl_run.sql._packing import Packer


@dataclass(kw_only=True)
class AttemptSpans:
    """The spans of an attempt that a store has already.

    Attributes:
        key: The store's key of the attempt, such as its number.
        last: Highest stored sequence.
        is_late: Whether the attempt is decided.
        has: Returns true if the span with that id is stored.
    """

    key: Any
    last: int
    is_late: bool
    has: Callable[[str], bool]


def place_spans(
    spans: Sequence[Span], packer: Packer, find: Callable[[Span], AttemptSpans]
) -> list[tuple[Any, int, str, bytes]]:
    """Make rows of the spans that are not stored yet: attempt's key, sequence, span id, and the packed span.

    Packs all spans before the caller stores the first, so that a span that cannot be packed leaves no trace.
    """
    rows: dict[tuple[Any, str], tuple[Any, int, str, bytes]] = {}
    known: dict[tuple[str, str], AttemptSpans] = {}
    try:
        for span in spans:
            where = span.rollout_id, span.attempt_id
            held = known.get(where) or known.setdefault(where, find(span))
            if (held.key, span.span_id) in rows or held.has(span.span_id):
                continue
            kept = placed(span, last=held.last, is_late=held.is_late)
            held.last = kept.sequence
            packed = packer.pack(kept, attempt=held.key, sequence=held.last)
            rows[held.key, span.span_id] = held.key, held.last, span.span_id, packed
    except StoreError:
        packer.clear()  # its marks may refer to spans that are not stored
        raise
    return list(rows.values())
