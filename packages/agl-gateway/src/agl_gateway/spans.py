"""Recorded exchanges as spans: one ``chat`` span per sampled choice, by the GenAI conventions."""

import zlib
from hashlib import blake2b
from typing import Any, cast

from agl import semconv
from agl.capture.dialects import calls_of
from agl.ids import new_span_id
from agl.schemas import ModelCall, Span
from agl_gateway.exchanges import Recorded

_OPERATIONS = {"embeddings": semconv.OP_EMBEDDINGS, "completions": semconv.OP_TEXT_COMPLETION}
_MAX_INFLATED = 64 * 1024 * 1024


def spans_of(recorded: Recorded) -> list[Span]:
    """The spans of one exchange, by choice."""
    calls = calls_of(
        recorded.exchange,
        policy=recorded.policy,
        model_version=recorded.model_version,
        want_ids=recorded.want_ids,
    )
    return [_span(recorded, call) for call in calls]


def _span(recorded: Recorded, call: ModelCall) -> Span:
    context = recorded.context
    operation = _OPERATIONS.get(call.dialect, semconv.OP_CHAT)
    return Span(
        rollout_id=context.rollout_id,
        attempt_id=context.attempt_id,
        span_id=new_span_id(),
        name=f"{operation} {call.model}".rstrip(),
        trace_id=context.trace_id or trace_id_of(context.attempt_id),
        parent_id=context.parent_id,
        kind="client",
        start_ns=recorded.start_ns,
        end_ns=recorded.end_ns,
        status="error" if call.error else "ok",
        status_message=call.error,
        attributes=_attributes(recorded, call, operation),
        call=call,
    )


def trace_id_of(attempt_id: str) -> str:
    """The trace of an attempt whose client sent none: the same for all of its calls."""
    return blake2b(attempt_id.encode(), digest_size=16).hexdigest()


def _attributes(recorded: Recorded, call: ModelCall, operation: str) -> dict[str, Any]:
    found: dict[str, Any] = {semconv.OPERATION: operation, semconv.REQUEST_MODEL: call.model}
    response = _as_dict(call.response)
    for name, key in ((semconv.RESPONSE_ID, "id"), (semconv.RESPONSE_MODEL, "model")):
        if isinstance(response.get(key), str):
            found[name] = response[key]
    if call.finish_reason:
        found[semconv.FINISH_REASONS] = [call.finish_reason]
    found.update(_usage(response.get("usage"), call))
    if call.model_version:
        found[semconv.MODEL_VERSION] = call.model_version
    if recorded.context.framework_span_id:
        found[semconv.FRAMEWORK_SPAN_ID] = recorded.context.framework_span_id
    if call.error:
        found[semconv.ERROR_TYPE] = str(call.status_code) if call.status_code >= 400 else "incomplete"
    return found


def _usage(usage: Any, call: ModelCall) -> dict[str, int]:
    """Token counts: of the ids where there are some, else what the backend counted."""
    counted = _as_dict(usage)
    prompt = call.prompt_len or counted.get("prompt_tokens", counted.get("input_tokens"))
    response = call.response_len or counted.get("completion_tokens", counted.get("output_tokens"))
    pairs = ((semconv.INPUT_TOKENS, prompt), (semconv.OUTPUT_TOKENS, response))
    return {name: value for name, value in pairs if isinstance(value, int)}


def _as_dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def plain_bytes(body: bytes, encoding: str) -> bytes:
    """``body`` without its content encoding; as it is when it cannot be undone within 64 MiB."""
    if encoding not in ("gzip", "deflate"):
        return body
    inflater = zlib.decompressobj(wbits=47 if encoding == "gzip" else 15)
    try:
        return inflater.decompress(body, _MAX_INFLATED)
    except zlib.error:
        return body
