"""The order of an attempt's spans: by start time, because several writers append and their batches may cross."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from agl.schemas import Span

Moment = tuple[int, int]
"""A point in an attempt; two of one :class:`Timeline` compare."""


class Timeline(NamedTuple):
    """Spans in order of time, with the moments at which each begins and ends."""

    spans: list[Span]
    start: Callable[[Span], Moment]
    end: Callable[[Span], Moment]


def chronological(spans: Sequence[Span]) -> Timeline:
    """Order by start time, then by the store's sequence; by sequence alone when a span has no start time."""
    if all(span.start_ns > 0 for span in spans):
        return Timeline(sorted(spans, key=_start), _start, _end)
    return Timeline(sorted(spans, key=_sequence), _sequence, _sequence)


def _start(span: Span) -> Moment:
    return span.start_ns, span.sequence


def _end(span: Span) -> Moment:
    return max(span.end_ns, span.start_ns), span.sequence


def _sequence(span: Span) -> Moment:
    return span.sequence, span.start_ns
