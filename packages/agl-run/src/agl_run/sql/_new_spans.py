"""Numbers the spans of an attempt and packs those that a store does not have yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agl.errors import StoreError
from agl.schemas import Span
from agl.stores import placed
from agl_run.sql._packing import Packer


@dataclass(kw_only=True)
class AttemptSpans:
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
    spans: Sequence[Span], packer: Packer, find: Callable[[Span], AttemptSpans]
) -> list[tuple[Any, int, str, bytes]]:
    """The rows of those spans that are not there: attempt's number, sequence, span id, and the packed span.

    All are packed before the first is kept, so that one that cannot be packed leaves no trace.
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
        packer.clear()  # what it remembers of these is not kept
        raise
    return list(rows.values())
