"""Converts the SDK's spans and traces to span attributes; no other module of this package reads them."""

from typing import TYPE_CHECKING, Any, cast

from agents import RunConfig

from agl import semconv
from agl.tracing import ActiveAttempt, OpenSpan, open_span

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPANLESS = frozenset({"task", "turn"})
"""Kinds of spans that only divide an agent's work; their children belong to the enclosing span."""

_UNNAMED = RunConfig().workflow_name
"""The SDK's default workflow name; a workflow with it counts as unnamed."""

_OPERATIONS = {"mcp_tools": "list_tools"}
"""Names of operations in the semantic conventions, by the SDK's different names."""


def has_no_span(source: Any) -> bool:
    """Return true for a span of the SDK that is not recorded."""
    data = getattr(source, "span_data", None)
    return data is not None and (
        data.type in _SPANLESS or (data.type == "custom" and "sdk_span_type" in (data.data or {}))
    )


def open_from(source: Any, attempt: ActiveAttempt, parent: str | None) -> OpenSpan:
    """Open a span for a span or trace of the SDK that is starting now."""
    data = getattr(source, "span_data", None)
    is_own = data is not None and data.type == "custom"
    return open_span(
        f"{semconv.OP_INVOKE_WORKFLOW} {source.name}" if data is None else _name(data),
        attempt=attempt,
        parent=parent,
        attributes=(lambda: getattr(data, "data", None) or {}) if is_own else None,
        is_current=False,
        **about(source),
    )


def about(source: Any) -> dict[str, Any]:
    """Return the attributes of a span or trace that the SDK knows so far; empty for a program's custom spans."""
    data = getattr(source, "span_data", None)
    if data is None:
        group = getattr(source, "group_id", None)
        name = None if source.name == _UNNAMED else str(source.name)
        return {"operation": semconv.OP_INVOKE_WORKFLOW, "workflow": name, "conversation": group}
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


def class_name(model: Any) -> str:
    """Return the class name of a model, with its module."""
    kind = cast("type[Any]", type(model))
    return f"{kind.__module__}.{kind.__qualname__}"


def is_model_call(source: Any) -> bool:
    """Return true for a span of the SDK that reports a model call."""
    return getattr(getattr(source, "span_data", None), "type", "") in ("generation", "response")


def about_error(source: Any, raised: BaseException | None) -> dict[str, Any]:
    """Return a span's error as arguments of ``close``; empty without one, and for a hand-off, which is not an error."""
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
    """Return the full name for kinds of spans that are not named after an agent, a tool or a model; else ``""``."""
    if data.type in ("agent", "function", "handoff", "generation", "response"):
        return ""
    name = str(getattr(data, "name", None) or "")
    return name if data.type == "custom" else f"{_OPERATIONS.get(data.type, data.type)} {name}".strip()


def _model_of(data: Any) -> str:
    return str((data.model if data.type == "generation" else getattr(data.response, "model", None)) or "")


def _server_of(data: Any) -> str:
    """Return the URL of the model's server; ``""`` if the SDK does not report it."""
    settings = cast("Mapping[str, Any]", getattr(data, "model_config", None) or {})
    return str(settings.get("base_url") or "")
