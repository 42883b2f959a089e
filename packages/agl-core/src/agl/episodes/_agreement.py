"""Compares the model calls that frameworks report with those that were recorded.

If a framework's ``chat`` span has no recorded call, that call bypassed the gateway and the wire hook, because its
client uses another protocol or library. If a recorded call lies outside every framework span, in an attempt where a
framework has spans, some part of the agent is not observed. Both cases are found by the links between spans, never by
names. A span with the attribute :data:`agl.semconv.UNRECORDED` comes from the tracer ``unrecorded``, which noticed a
call of an HTTP client; such a span is no evidence that a framework is observed.

A program that reports over OTLP may not link its calls to its spans. So a ``chat`` span also counts as recorded if a
call that names no span began while the ``chat`` span was open.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal

from agl import semconv
from agl._actors import Enclosing
from agl.schemas import LooseCall, Record, Span

_CHATS = (semconv.OP_CHAT, semconv.OP_TEXT_COMPLETION, "generate_content")  # compared with values of any type
_OURS = (semconv.OP_EVALUATE,)
# 5 ms: two clocks of one machine, the program's and the recorder's, are read at different points of
# a call.
_TOLERANCE_NS = 5_000_000

Verdict = Literal["drop", "accept"]
"""What happens to a rollout with calls that only one side saw: ``drop`` leaves it out of training."""


class Agreement(Record, frozen=True, kw_only=True):
    """The model calls that were only reported or only recorded, in order of time.

    Attributes:
        unseen: Calls that a framework or a client's tracer reported but that were not recorded. Failed calls are left
            out, as they may never have left the agent.
        unattributed: Recorded calls outside every framework span, if a framework reported other calls.
    """

    unseen: tuple[LooseCall, ...] = ()
    unattributed: tuple[LooseCall, ...] = ()


def find_disagreement(spans: Sequence[Span], *, attempt_id: str | None) -> Agreement:
    """Compare the reported calls of the deciding attempt with the recorded ones; late spans are left out."""
    own = [span for span in spans if span.attempt_id == attempt_id and not span.is_late]
    reported = [span for span in own if _is_reported(span)]
    if not reported:
        return Agreement()
    # A watch on clients sees one client and no framework: its spans say that a call was missed, not
    # which part of the agent is observed.
    is_framework_there = not all(map(_is_watched, reported))
    # In order of time, because the matching below takes the earliest call that fits.
    own.sort(key=lambda span: (span.start_ns, span.sequence))
    by_id = {span.span_id: span for span in own}
    calls = [span for span in own if span.call is not None]
    loose = [span for span in calls if _enclosing_span(span, by_id) is None]
    # A call that names its span is linked or not; only one that names none may be matched by time.
    unnamed = [span for span in loose if semconv.FRAMEWORK_SPAN_ID not in span.attributes]
    unseen = _without_overlapping_call(_unseen(own, calls, by_id), unnamed)
    enclosing = Enclosing(own)
    return Agreement(
        unseen=tuple(_loose_call(span, enclosing) for span in unseen),
        unattributed=tuple(_loose_call(span, enclosing) for span in loose if is_framework_there and not _embeds(span)),
    )


def client_of(span: Span) -> str:
    """The client that made a call, and the server if it is known: ``CLASS to HOST``."""
    attributes = span.attributes
    keys = (semconv.CLIENT, semconv.USER_AGENT, "otel.scope.name", semconv.PROVIDER)
    name = next((str(attributes[key]) for key in keys if attributes.get(key)), "an unknown client")
    server = attributes.get(semconv.SERVER_ADDRESS)
    return f"{name} to {server}" if server else name


def _unseen(own: Sequence[Span], calls: Sequence[Span], by_id: Mapping[str, Span]) -> list[Span]:
    """The successful chat spans in which no call was recorded; of nested chat spans, only the outer one."""
    seen: set[str] = set()
    for call in calls:
        # The spans around a span that was visited before were visited too, so each is visited once.
        seen.update(span.span_id for span in takewhile(lambda span: span.span_id not in seen, _around(call, by_id)))
    found: dict[str, Span] = {}
    for span in own:
        is_chat = span.call is None and span.attributes.get(semconv.OPERATION) in _CHATS
        is_answered = is_chat and span.span_id not in seen and span.status != "error"
        if is_answered and not any(above.span_id in found for above in _around(span, by_id)):
            found[span.span_id] = span
    return list(found.values())


def _around(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    """The spans around ``span``, innermost first, up to the attempt's root or to a cycle in foreign data."""
    visited = {span.span_id}
    above = _enclosing_span(span, by_id)
    while above is not None and above.span_id not in visited:
        yield above
        visited.add(above.span_id)
        above = _enclosing_span(above, by_id)


def _without_overlapping_call(chats: Sequence[Span], calls: Sequence[Span]) -> list[Span]:
    """Match each call with a chat span that was open when the call began; return the chat spans without a match."""
    left = list(chats)
    for call in calls:
        begun = takewhile(lambda chat: chat.start_ns - _TOLERANCE_NS <= call.start_ns, left)  # noqa: B023  # used at once
        held = [chat for chat in begun if call.start_ns <= chat.end_ns + _TOLERANCE_NS and not _is_watched(chat)]
        if held:
            # The one that ends first, so that the others stay for later calls: with intervals this
            # greedy choice matches as many as any other.
            left.remove(min(held, key=lambda chat: chat.end_ns))
    return left


def _enclosing_span(span: Span, by_id: Mapping[str, Span]) -> Span | None:
    """The span around ``span``; ``None`` if only the attempt's root is around it."""
    framework = span.attributes.get(semconv.FRAMEWORK_SPAN_ID)
    found = by_id.get(framework) if isinstance(framework, str) else None
    # The link that travelled with the call comes first: the parent may be a span of the HTTP
    # client.
    found = found or by_id.get(span.parent_id or "")
    return None if found is None or found.name == semconv.ROOT_SPAN_NAME else found


def _embeds(span: Span) -> bool:
    """True if the call embeds texts, which no agent says and frameworks do not report."""
    return span.call is not None and span.call.dialect == "embeddings"


def _is_watched(span: Span) -> bool:
    """True if the span reports a call of an HTTP client whose calls are not recorded."""
    return semconv.UNRECORDED in span.attributes


def _is_reported(span: Span) -> bool:
    """True if the span comes from a framework's tracer, or from the framework's own OpenTelemetry."""
    operation = span.attributes.get(semconv.OPERATION)
    return span.call is None and span.reward is None and operation is not None and operation not in _OURS


def _loose_call(span: Span, enclosing: Enclosing) -> LooseCall:
    return LooseCall(
        span_id=span.span_id,
        agent=enclosing.who(span).agent,
        model=str(span.attributes.get(semconv.REQUEST_MODEL) or (span.call.model if span.call else "")),
        client=client_of(span),
        is_foreign=span.attributes.get(semconv.UNRECORDED) == "foreign",
    )
