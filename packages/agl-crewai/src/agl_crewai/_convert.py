"""The one place where CrewAI's events become our spans."""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

from crewai.events.event_context import VALID_EVENT_PAIRS

from agl import semconv
from agl.schemas import Span
from agl.tracing import Capture, host_of, plain

_DELEGATION = ("delegate_work_to_coworker", "ask_question_to_coworker")
_FAILED = ("_failed", "_error")
_UNKNOWN_ERROR = "_OTHER"
"""The conventions' value of ``error.type`` where an error has no type; CrewAI keeps most errors as text."""

_IDENTITY = ("flow_name", "method_name", "crew_name", "tool_name", "call_id")
"""What the two events of one scope have in common, as far as they have it."""

_UNENDED = "CrewAI did not end it"

Attributes = dict[str, Any]


def span_id(event_id: str) -> str:
    """The id of the span of the event with this id, a UUID: half of its digits."""
    return event_id.replace("-", "")[:16]


def clock_of(event: Any) -> int:
    """When the event was emitted, by ``time.perf_counter_ns``; its handler runs somewhat later."""
    return time.perf_counter_ns() - (time.time_ns() - _ns(event.timestamp))


def belong(start: Any, end: Any) -> bool:
    """Whether ``end`` can be the end of ``start``: CrewAI pairs them wrongly after some failures."""
    if VALID_EVENT_PAIRS.get(end.type, start.type) != start.type:
        return False
    before, after = _fields(start), _fields(end)
    return all(before.get(name) == after.get(name) for name in _IDENTITY)


def _fields(event: Any) -> dict[str, Any]:
    """What the event has; asking a pydantic model for a field that it lacks is slow."""
    return cast("dict[str, Any]", vars(event))


def client_of(source: Any, event: Any) -> dict[str, str]:
    """The class that calls the model and the host that it is set to; empty for an event that is no model call."""
    if event.type != "llm_call_started":
        return {}
    kind = cast("type[Any]", type(source))
    host = host_of(str(getattr(source, "base_url", None) or ""))
    found = {semconv.CLIENT: f"{kind.__module__}.{kind.__qualname__}"}
    return {**found, semconv.SERVER_ADDRESS: host} if host else found


def span_of(start: Any, end: Any, capture: Capture, parent_id: str, client: Mapping[str, str]) -> Span:
    """The span between two events."""
    error = _error(end)
    attributes = {**_attributes(start), **client, **_results(end)}
    if error is not None:
        attributes[semconv.ERROR_TYPE] = _error_type(end, error)
    return _span(
        start,
        capture,
        parent_id,
        end_ns=_ns(end.timestamp),
        attributes=attributes,
        status="ok" if error is None else "error",
        status_message="" if error is None else plain(str(getattr(error, "message", error))),
    )


def unended(start: Any, capture: Capture, parent_id: str, client: Mapping[str, str]) -> Span:
    """The span of an event whose end never came: something in it failed, or was stopped."""
    attributes = {**_attributes(start), **client}
    return _span(start, capture, parent_id, end_ns=0, attributes=attributes, status="error", status_message=_UNENDED)


def _span(start: Any, capture: Capture, parent_id: str, *, end_ns: int, attributes: Attributes, **status: Any) -> Span:
    start_ns = _ns(start.timestamp)
    names = (semconv.AGENT_NAME, semconv.TOOL_NAME, semconv.WORKFLOW_NAME, semconv.NODE, semconv.REQUEST_MODEL)
    label = attributes.pop(_LABEL, "") or next((attributes[name] for name in names if name in attributes), "")
    return Span(
        rollout_id=capture.rollout_id,
        attempt_id=capture.attempt_id,
        trace_id=capture.trace_id,
        span_id=span_id(start.event_id),
        parent_id=parent_id,
        name=f"{attributes[semconv.OPERATION]} {label}".rstrip(),
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        attributes=attributes,
        **status,
    )


def _attributes(start: Any) -> Attributes:
    describe = _STARTS.get(start.type)
    found: Attributes = {semconv.OPERATION: start.type.removesuffix("_started")}
    return {**found, **(describe(start) if describe else {})}


def _crew(event: Any) -> Attributes:
    return {semconv.OPERATION: semconv.OP_INVOKE_WORKFLOW, semconv.WORKFLOW_NAME: str(event.crew_name or "crew")}


def _flow(event: Any) -> Attributes:
    return {semconv.OPERATION: semconv.OP_INVOKE_WORKFLOW, semconv.WORKFLOW_NAME: str(event.flow_name)}


def _method(event: Any) -> Attributes:
    return {semconv.OPERATION: "invoke_node", semconv.NODE: str(event.method_name)}


def _task(event: Any) -> Attributes:
    """A task's name is a node's. Its description, CrewAI's name of a task that has none, is too long for one."""
    name, found = getattr(event.task, "name", None), {semconv.OPERATION: "invoke_task"}
    return {**found, semconv.NODE: str(name)} if name else found


def _agent(event: Any) -> Attributes:
    return _named_agent(event.agent.role, event.agent.id)


def _lite_agent(event: Any) -> Attributes:
    return _named_agent(event.agent_info.get("role"), event.agent_info.get("id"))


def _named_agent(role: object, agent_id: object) -> Attributes:
    found = {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: str(role or "agent").strip()}
    return found if agent_id is None else {**found, semconv.AGENT_ID: str(agent_id)}


def _tool(event: Any) -> Attributes:
    arguments = plain(event.tool_args)
    found: Attributes = {
        semconv.OPERATION: semconv.OP_EXECUTE_TOOL,
        semconv.TOOL_NAME: str(event.tool_name),
        semconv.TOOL_ARGUMENTS: arguments,
    }
    if event.tool_name.lower().replace(" ", "_") in _DELEGATION and isinstance(arguments, dict):
        given = cast("Mapping[str, Any]", arguments)
        found[semconv.HANDOFF_SOURCE] = str(event.agent_role or "").strip()
        found[semconv.HANDOFF_TARGET] = str(given.get("coworker") or given.get("co_worker") or "").strip()
    return found


def _model(event: Any) -> Attributes:
    found = {semconv.OPERATION: semconv.OP_CHAT, semconv.REQUEST_MODEL: str(event.model or "")}
    role = str(event.agent_role or "").strip()
    return {**found, _LABEL: found[semconv.REQUEST_MODEL], **({semconv.AGENT_NAME: role} if role else {})}


_LABEL = "label"
"""Key of what the span's name says after the operation, where that is not the first name among the attributes."""

_STARTS: dict[str, Callable[[Any], Attributes]] = {
    "crew_kickoff_started": _crew,
    "flow_started": _flow,
    "method_execution_started": _method,
    "task_started": _task,
    "agent_execution_started": _agent,
    "lite_agent_execution_started": _lite_agent,
    "tool_usage_started": _tool,
    "llm_call_started": _model,
}


def _results(end: Any) -> Attributes:
    return {semconv.TOOL_RESULT: plain(end.output)} if end.type == "tool_usage_finished" else {}


def _error(end: Any) -> object | None:
    """What went wrong: a failing event's error, or a failure that a tool reported without raising."""
    if end.type.endswith(_FAILED):
        return _fields(end).get("error") or end.type
    return _fields(end).get("failure")


def _error_type(end: Any, error: object) -> str:
    kind = getattr(end, "error_type", None)
    if not isinstance(kind, type):
        kind = None if isinstance(error, str) else type(error)
    return kind.__qualname__ if kind else _UNKNOWN_ERROR


def _ns(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000
