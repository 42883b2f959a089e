"""Converts CrewAI's events to span attributes; no other module of this package reads them."""

from collections.abc import Callable
from typing import Any, cast

from crewai.events.event_context import VALID_EVENT_PAIRS
from crewai.utilities.string_utils import sanitize_tool_name

from agl import semconv

_DELEGATION = ("delegate_work_to_coworker", "ask_question_to_coworker")
_FAILED = ("_failed", "_error")
_UNKNOWN_ERROR = "_OTHER"
"""The conventions' value of ``error.type`` for an error without a type; CrewAI reports most errors as text."""

_IDENTITY = ("flow_name", "method_name", "crew_name", "tool_name", "call_id")
"""Fields that must be equal in the start and end events of a scope, where both events have them."""


def span_id(event_id: str) -> str:
    """Return the id of an event's span: the first half of the digits of the event's id, a UUID."""
    return event_id.replace("-", "")[:16]


def time_of(event: Any) -> int:
    """Return the time at which the event was emitted, in Unix nanoseconds; its handler runs somewhat later."""
    return int(event.timestamp.timestamp() * 1_000_000) * 1000


def is_pair(start: Any, end: Any) -> bool:
    """Return true if ``end`` can be the end of ``start``; after some failures CrewAI pairs the wrong events."""
    if VALID_EVENT_PAIRS.get(end.type, start.type) != start.type:
        return False
    before, after = _identity(start), _identity(end)
    return all(before.get(name) == after.get(name) for name in _IDENTITY)


def _identity(event: Any) -> dict[str, Any]:
    """Return the event's fields with a normalised tool name, which start and end may spell differently."""
    found = _fields(event)
    name = found.get("tool_name")
    return found if name is None else {**found, "tool_name": sanitize_tool_name(str(name))}


def _fields(event: Any) -> dict[str, Any]:
    """Return the event's fields as a dict, because asking a pydantic model for a missing field is slow."""
    return cast("dict[str, Any]", vars(event))


def about_start(source: Any, event: Any) -> dict[str, Any]:
    """Return the attributes of the scope that ``event`` starts; the ``source`` of a model call is its client."""
    describe = _STARTS.get(event.type)
    found: dict[str, Any] = {"operation": event.type.removesuffix("_started"), **(describe(event) if describe else {})}
    if event.type == "flow_started" and type(source).__module__.startswith("crewai."):  # a flow of CrewAI itself
        return {"operation": found["operation"], "name": f"{found['operation']} {event.flow_name}"}
    if not is_model_call(event):
        return found
    return {**found, "client": class_name(source), "server": str(getattr(source, "base_url", None) or "")}


def is_model_call(event: Any) -> bool:
    """Return true for the event that reports the start of a model call."""
    return event.type == "llm_call_started"


def class_name(model: Any) -> str:
    """Return the class name of a model's client, with its module."""
    kind = cast("type[Any]", type(model))
    return f"{kind.__module__}.{kind.__qualname__}"


def about_end(event: Any) -> dict[str, Any]:
    """Return the outcome of the scope that ``event`` ends, as arguments of ``close``."""
    found: dict[str, Any] = {"end_ns": time_of(event)}
    if event.type == "tool_usage_finished":
        found["result"] = event.output
    error = _error(event)
    if error is None:
        return found
    return {**found, "error": str(getattr(error, "message", error)), "error_type": _error_type(event, error)}


def _crew(event: Any) -> dict[str, Any]:
    return {"operation": semconv.OP_INVOKE_WORKFLOW, "workflow": str(event.crew_name or "crew")}


def _flow(event: Any) -> dict[str, Any]:
    return {"operation": semconv.OP_INVOKE_WORKFLOW, "workflow": str(event.flow_name)}


def _method(event: Any) -> dict[str, Any]:
    return {"operation": semconv.OP_INVOKE_NODE, "node": str(event.method_name)}


def _task(event: Any) -> dict[str, Any]:
    """Return a task as a node with the task's own name; an unnamed task's description would be too long as a name."""
    return {"operation": "invoke_task", "node": getattr(event.task, "name", None)}


def _agent(event: Any) -> dict[str, Any]:
    return _named_agent(event.agent.role, event.agent.id)


def _lite_agent(event: Any) -> dict[str, Any]:
    return _named_agent(event.agent_info.get("role"), event.agent_info.get("id"))


def _named_agent(role: object, agent_id: object) -> dict[str, Any]:
    name = str(role or "agent").strip()
    return {"operation": semconv.OP_INVOKE_AGENT, "agent": name, "agent_id": str(agent_id or "")}


def _tool(event: Any) -> dict[str, Any]:
    arguments = event.tool_args
    found = {"operation": semconv.OP_EXECUTE_TOOL, "tool": str(event.tool_name), "arguments": arguments}
    if event.tool_name.lower().replace(" ", "_") not in _DELEGATION or not isinstance(arguments, dict):
        return found
    given = cast("dict[str, Any]", arguments)
    target = str(given.get("coworker") or given.get("co_worker") or "").strip()
    return {**found, "source": str(event.agent_role or "").strip(), "target": target}


def _model(event: Any) -> dict[str, Any]:
    role = str(event.agent_role or "").strip()
    return {"operation": semconv.OP_CHAT, "model": str(event.model or ""), "agent": role}


_STARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "crew_kickoff_started": _crew,
    "flow_started": _flow,
    "method_execution_started": _method,
    "task_started": _task,
    "agent_execution_started": _agent,
    "lite_agent_execution_started": _lite_agent,
    "tool_usage_started": _tool,
    "llm_call_started": _model,
}


def _error(end: Any) -> object | None:
    """Return the error of a failing event, or a failure that a tool reported without raising."""
    if end.type.endswith(_FAILED):
        return _fields(end).get("error") or end.type
    return _fields(end).get("failure")


def _error_type(end: Any, error: object) -> str:
    kind = getattr(end, "error_type", None)
    if not isinstance(kind, type):
        kind = None if isinstance(error, str) else type(error)
    return kind.__qualname__ if kind else _UNKNOWN_ERROR
