"""Turns recorded model calls into ``chat`` spans: the same for the gateway and for calls recorded in the process."""

from collections.abc import Sequence
from typing import Any, cast

from agl import semconv
from agl.ids import new_span_id
from agl.schemas import Dialect, ModelCall, Span

_OPERATIONS: dict[Dialect, str] = {
    "completions": semconv.OP_TEXT_COMPLETION,
    "embeddings": semconv.OP_EMBEDDINGS,
}
_USAGE = (
    (semconv.INPUT_TOKENS, ("prompt_tokens", "input_tokens")),
    (semconv.OUTPUT_TOKENS, ("completion_tokens", "output_tokens")),
)


def chat_spans(
    calls: Sequence[ModelCall],
    *,
    rollout_id: str,
    attempt_id: str,
    trace_id: str,
    parent_id: str | None,
    start_ns: int,
    end_ns: int,
) -> list[Span]:
    """One span per call, all below ``parent_id``, the span in which the request was made."""
    return [
        Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            span_id=new_span_id(),
            trace_id=trace_id,
            parent_id=parent_id,
            name=f"chat {call.model}".strip(),
            kind="client",
            start_ns=start_ns,
            end_ns=end_ns,
            status="error" if call.error else "ok",
            status_message=call.error,
            attributes=call_attributes(call),
            call=call,
        )
        for call in calls
    ]


def call_attributes(call: ModelCall) -> dict[str, Any]:
    """What the GenAI conventions name of a call; only what is known."""
    answer = _mapping(call.response)
    found: dict[str, Any] = {
        semconv.OPERATION: _OPERATIONS.get(call.dialect, semconv.OP_CHAT),
        semconv.REQUEST_MODEL: call.model,
        semconv.RESPONSE_MODEL: answer.get("model"),
        semconv.RESPONSE_ID: answer.get("id"),
        semconv.FINISH_REASONS: [call.finish_reason] if call.finish_reason else None,
        semconv.MODEL_VERSION: call.model_version,
        semconv.ERROR_TYPE: _error_type(call),
        **_usage(_mapping(answer.get("usage"))),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _error_type(call: ModelCall) -> str:
    if not call.error:
        return ""
    return str(call.status_code) if call.status_code >= 400 else "incomplete" if call.status_code else "no_response"


def _usage(counts: dict[str, Any]) -> dict[str, int]:
    found = {name: next((counts[key] for key in keys if key in counts), None) for name, keys in _USAGE}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
