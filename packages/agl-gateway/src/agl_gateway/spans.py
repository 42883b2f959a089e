"""Converts recorded exchanges into spans: one ``chat`` span per sampled choice, by the GenAI conventions."""

import zlib
from hashlib import blake2b

from agl import semconv
from agl.dialects import calls_of
from agl.schemas import Json, Span
from agl.tracing import chat_spans
from agl_gateway.exchanges import RecordedExchange

_MAX_INFLATED = 64 * 1024 * 1024


def spans_of(recorded: RecordedExchange) -> list[Span]:
    """Return the spans of one exchange, one per choice."""
    calls = calls_of(
        recorded.exchange,
        policy=recorded.policy,
        model_version=recorded.model_version,
        want_ids=recorded.want_ids,
    )
    context = recorded.context
    about: dict[str, Json] = {
        semconv.CALLER: list(context.names),
        semconv.USER_AGENT: context.client,
        semconv.SPLIT_ARM: recorded.arm,
    }
    return chat_spans(
        calls,
        rollout_id=context.rollout_id,
        attempt_id=context.attempt_id,
        trace_id=context.trace_id or trace_id_of(context.attempt_id),
        parent_id=context.parent_id,
        framework_span_id=context.framework_span_id,
        start_ns=recorded.start_ns,
        end_ns=recorded.end_ns,
        about={key: value for key, value in about.items() if value},
    )


def trace_id_of(attempt_id: str) -> str:
    """Return the trace id for an attempt whose client sent none; the same for all of its calls."""
    return blake2b(attempt_id.encode(), digest_size=16).hexdigest()


def plain_bytes(body: bytes, encoding: str) -> bytes:
    """Return the decompressed ``body``; unchanged if that fails or exceeds 64 MiB."""
    if encoding not in ("gzip", "deflate"):
        return body
    inflater = zlib.decompressobj(wbits=47 if encoding == "gzip" else 15)
    try:
        return inflater.decompress(body, _MAX_INFLATED)
    except zlib.error:
        return body
