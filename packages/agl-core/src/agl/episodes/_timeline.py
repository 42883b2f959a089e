"""Orders an attempt's spans, and finds its final answer.

Several writers append spans, and their batches may overtake each other, so spans are sorted by their start.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from agl.dialects._conversation import call_messages
from agl.schemas import ModelCall, Span

Moment = tuple[int, int]
"""A position in an attempt's order of time; only moments of the same :class:`Timeline` can be compared."""


class Timeline(NamedTuple):
    """Spans in order of time, with functions that return the moments at which a span begins and ends."""

    spans: list[Span]
    start: Callable[[Span], Moment]
    end: Callable[[Span], Moment]


def chronological(spans: Sequence[Span]) -> Timeline:
    """Order spans by start time, then by the store's sequence; by sequence alone if any span has no start time."""
    # One span without a time cannot be placed among others with one, so then the store's numbers
    # order all of them.
    if all(span.start_ns > 0 for span in spans):
        return Timeline(sorted(spans, key=_start), _start, _end)
    return Timeline(sorted(spans, key=_sequence), _sequence, _sequence)


def _start(span: Span) -> Moment:
    return span.start_ns, span.sequence


def _end(span: Span) -> Moment:
    # Programs that report over OTLP may send spans that end before they begin.
    return max(span.end_ns, span.start_ns), span.sequence


def _sequence(span: Span) -> Moment:
    return span.sequence, span.start_ns


def is_answered(call: ModelCall) -> bool:
    """True if the whole answer arrived without an error."""
    return call.is_complete and not call.error and 200 <= call.status_code < 400


def final_text(spans: Sequence[Span]) -> str:
    """The text of the last complete model answer; ``""`` if no answer has text. Late calls are ignored."""
    for span in reversed(chronological(spans).spans):
        if span.call is None or span.is_late or not is_answered(span.call):
            continue
        text = _answer_text(span.call)
        if text:
            return text
    return ""


def _answer_text(call: ModelCall) -> str:
    if call.dialect == "embeddings" or call.response is None:
        return ""
    messages = call_messages(call)
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    return content if isinstance(content, str) else ""
