"""The SDK's spans and traces as ours; nothing else in this package looks into them."""

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agl import semconv
from agl.schemas import Span, new_span_id
from agl.tracing import Capture, failure, host_of, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

_PASSED = frozenset({"task", "turn"})
"""Kinds that only divide an agent's work; what happens in them belongs to the span around them."""

_OPERATIONS = {
    "agent": semconv.OP_INVOKE_AGENT,
    "function": semconv.OP_EXECUTE_TOOL,
    "generation": semconv.OP_CHAT,
    "response": semconv.OP_CHAT,
    "handoff": "handoff",
    "guardrail": "guardrail",
    "mcp_tools": "list_tools",
}
_STILL_OPEN = "still open when the attempt ended"


@dataclass(frozen=True, kw_only=True, eq=False)
class Open:
    """A span or a trace that has started.

    Attributes:
        source: The SDK's own object.
        span_id: Id of its span; for one that becomes none, of the span around it.
        raised: The exception that was being handled when it started: not one of its own.
    """

    capture: Capture
    source: Any
    parent_id: str
    is_recorded: bool = True
    raised: BaseException | None = None
    span_id: str = field(default_factory=new_span_id)
    start_ns: int = field(default_factory=time.time_ns)


def open_(source: Any, capture: Capture, *, parent_id: str) -> Open:
    """A span or trace that starts now."""
    if hasattr(source, "span_data") and _is_passed(source.span_data):
        return Open(capture=capture, source=source, parent_id=parent_id, is_recorded=False, span_id=parent_id)
    return Open(capture=capture, source=source, parent_id=parent_id, raised=sys.exception())


def _is_passed(data: Any) -> bool:
    return data.type in _PASSED or (data.type == "custom" and "sdk_span_type" in (data.data or {}))


def span_of(opened: Open, *, raised: BaseException | None = None, is_ended: bool = True) -> Span:
    """The span of what has ended, or is still open when its attempt ends."""
    is_span = hasattr(opened.source, "span_data")
    operation, name, attributes = _described(opened.source) if is_span else _workflow(opened.source)
    if operation:
        attributes = {semconv.OPERATION: operation, **attributes}
    status: dict[str, Any] = {"status": "error", "status_message": _STILL_OPEN}
    if is_ended:
        status = _status(opened.source, raised, attributes)
    capture = opened.capture
    return Span(
        rollout_id=capture.rollout_id,
        attempt_id=capture.attempt_id,
        trace_id=capture.trace_id,
        span_id=opened.span_id,
        parent_id=opened.parent_id,
        name=f"{operation} {name}".strip(),
        start_ns=opened.start_ns,
        end_ns=time.time_ns(),
        attributes=attributes,
        **status,
    )


def _workflow(trace: Any) -> tuple[str, str, dict[str, Any]]:
    attributes: dict[str, Any] = {semconv.WORKFLOW_NAME: str(trace.name)}
    group = getattr(trace, "group_id", None)
    if group:
        attributes[semconv.CONVERSATION_ID] = str(group)
    return semconv.OP_INVOKE_WORKFLOW, str(trace.name), attributes


def _described(span: Any) -> tuple[str, str, dict[str, Any]]:
    """Operation, name and attributes of a span; no operation for one that the program made itself."""
    data, kind = span.span_data, str(span.span_data.type)
    name = str(getattr(data, "name", None) or "")
    operation = "" if kind == "custom" else _OPERATIONS.get(kind, kind)
    if kind == "agent":
        return operation, name, {semconv.AGENT_NAME: name}
    if kind == "function":
        found = {semconv.TOOL_NAME: name, semconv.TOOL_ARGUMENTS: data.input, semconv.TOOL_RESULT: data.output}
        return operation, name, {key: plain(value) for key, value in found.items() if value is not None}
    if kind == "handoff":
        source, target = str(data.from_agent or ""), str(data.to_agent or "")
        return operation, target, {semconv.HANDOFF_SOURCE: source, semconv.HANDOFF_TARGET: target}
    if kind in ("generation", "response"):
        model = str(_model_of(data) or "")
        return operation, model, {**({semconv.REQUEST_MODEL: model} if model else {}), **_server_of(data)}
    if kind == "custom":
        return operation, name, cast("dict[str, Any]", plain(data.data or {}))
    return operation, name, {}


def _model_of(data: Any) -> Any:
    return data.model if data.type == "generation" else getattr(data.response, "model", None)


def _server_of(data: Any) -> dict[str, str]:
    """Where the model is called, as far as the SDK says it."""
    settings = cast("Mapping[str, Any]", getattr(data, "model_config", None) or {})
    host = host_of(str(settings.get("base_url") or ""))
    return {semconv.SERVER_ADDRESS: host} if host else {}


def _status(source: Any, raised: BaseException | None, attributes: dict[str, Any]) -> dict[str, Any]:
    """The status fields, with the error's type added to ``attributes``; a hand-off is no error."""
    if raised is not None and not isinstance(raised, GeneratorExit):
        attributes[semconv.ERROR_TYPE] = type(raised).__qualname__
        return failure(raised)
    error = cast("Mapping[str, Any] | None", getattr(source, "error", None))
    if not error or attributes.get(semconv.OPERATION) == "handoff":
        return {"status": "ok"}
    details = cast("Mapping[str, Any]", error.get("data") or {})
    attributes[semconv.ERROR_TYPE] = str(details.get("name") or "AgentsError")
    texts = (error.get("message"), details.get("message"), details.get("error"))
    return {"status": "error", "status_message": plain(": ".join(str(text) for text in texts if text))}
