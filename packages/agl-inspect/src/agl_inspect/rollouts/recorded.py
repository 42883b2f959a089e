"""Finds the complete answers of an attempt's model calls, which replays give again."""

from collections.abc import Sequence

from agl.episodes import Enclosing, chronological, is_answered
from agl.schemas import Dialect, Json, ModelCall, Record, Span
from agl_inspect.rollouts.answers import answer_of, exchanges_of


class RecordedAnswer(Record, frozen=True, kw_only=True):
    """An answer of the recorded rollout.

    Attributes:
        agent: The agent that made the call.
        request: The request body; only its conversation is compared.
        response: The response body with all its choices.
        span_ids: The spans of the call, one for each choice.
    """

    agent: str
    dialect: Dialect
    request: Json
    response: Json
    span_ids: tuple[str, ...] = ()


def recorded_answers(spans: Sequence[Span]) -> tuple[RecordedAnswer, ...]:
    """Return the complete answers of one attempt in order of time; the last one of a retried request."""
    timeline = chronological(spans)
    enclosing = Enclosing(timeline.spans)
    calls = {id(span.call): span for span in timeline.spans if span.call and is_answered(span.call)}
    kept: dict[str, list[ModelCall]] = {}
    for exchange in exchanges_of([span.call for span in calls.values() if span.call]):
        kept[exchange[0].request_id or calls[id(exchange[0])].span_id] = exchange
    return tuple(
        RecordedAnswer(
            agent=enclosing.who(calls[id(exchange[0])]).agent,
            dialect=exchange[0].dialect,
            request=exchange[0].request,
            response=answer,
            span_ids=tuple(calls[id(call)].span_id for call in exchange if id(call) in calls),
        )
        for exchange in kept.values()
        if exchange[0].dialect != "embeddings" and (answer := answer_of(exchange)) is not None
    )
