"""The SDK's spans and traces as what a span of ours says; nothing else in this package looks into them."""

from typing import TYPE_CHECKING, Any, cast

from agl import semconv
from agl.tracing import ActiveAttempt, OpenSpan, open_span

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPANLESS = frozenset({"task", "turn"})
"""Kinds that only divide an agent's work; what happens in them belongs to the span around them."""

_OPERATIONS = {"mcp_tools": "list_tools"}
"""Operations that the SDK has other names for."""


def has_no_span(source: Any) -> bool:
    """Whether a span or trace of the SDK's gets no span."""
    data = getattr(source, "span_data", None)
    return data is not None and (
        data.type in _SPANLESS or (data.type == "custom" and "sdk_span_type" in (data.data or {}))
    )


def open_from(source: Any, attempt: ActiveAttempt, parent: str | None) -> OpenSpan:
    """The span of a span or trace of the SDK's that starts now."""
    data = getattr(source, "span_data", None)
    is_own = data is not None and data.type == "custom"
    return open_span(
        _name(data) if data is not None else "",
        attempt=attempt,
        parent=parent,
        attributes=(lambda: getattr(data, "data", None) or {}) if is_own else None,
        is_current=False,
        **about(source),
    )


def about(source: Any) -> dict[str, Any]:
    """What a span or trace is about, as far as the SDK says it by now; of a program's own spans only the name."""
    data = getattr(source, "span_data", None)
    if data is None:
        group = getattr(source, "group_id", None)
        return {"operation": semconv.OP_INVOKE_WORKFLOW, "workflow": str(source.name), "conversation": group}
    match data.type:
        case "agent":
            return {"agent": data.name}
        case "function":
            return {"tool": data.name, "arguments": data.input, "result": data.output}
        case "handoff":
            return {"operation": semconv.OP_HANDOFF, "source": data.from_agent, "target": data.to_agent}
        case "generation" | "response":
            return {"operation": semconv.OP_CHAT, "model": _model_of(data), "server": _server_of(data)}
        case "custom":
            return {}
        case other:
            return {"operation": _OPERATIONS.get(other, other)}


def about_error(source: Any, raised: BaseException | None) -> dict[str, Any]:
    """Why a span failed, as arguments of ``close``; a hand-off is no error."""
    if raised is not None:
        return {"error": raised}
    error = cast("Mapping[str, Any] | None", getattr(source, "error", None))
    if not error or source.span_data.type == "handoff":
        return {}
    details = cast("Mapping[str, Any]", error.get("data") or {})
    texts = (error.get("message"), details.get("message"), details.get("error"))
    text = ": ".join(str(text) for text in texts if text)
    return {"error": text, "error_type": str(details.get("name") or "AgentsError")}


def _name(data: Any) -> str:
    """The whole name of a span that is about nothing that names it."""
    if data.type in ("agent", "function", "handoff", "generation", "response"):
        return ""
    name = str(getattr(data, "name", None) or "")
    return name if data.type == "custom" else f"{_OPERATIONS.get(data.type, data.type)} {name}".strip()


def _model_of(data: Any) -> str:
    return str((data.model if data.type == "generation" else getattr(data.response, "model", None)) or "")


def _server_of(data: Any) -> str:
    """Where the model is called, as far as the SDK says it."""
    settings = cast("Mapping[str, Any]", getattr(data, "model_config", None) or {})
    return str(settings.get("base_url") or "")
