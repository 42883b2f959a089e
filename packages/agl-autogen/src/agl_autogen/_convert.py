"""The one place where AutoGen's objects become our names and texts."""

import json
import time
from collections.abc import Mapping
from typing import Any, cast

from autogen_agentchat.messages import HandoffMessage

from agl import semconv
from agl.schemas import Span, new_span_id
from agl.tracing import Capture, plain

_MANAGERS = ("SelectorGroupChatManager", "MagenticOneOrchestrator")
"""The parts of teams that call a model in their own name; they are found by name, as AutoGen does not export them."""

_AGENTCHAT = "autogen_agentchat."
_CORE = "autogen_core."


def workflow_attributes(team: Any) -> dict[str, str]:
    """Attributes of the span around a team's run."""
    return {semconv.OPERATION: semconv.OP_INVOKE_WORKFLOW, semconv.WORKFLOW_NAME: str(team.name)}


def unspoken_agent(agent: Any) -> dict[str, str]:
    """Attributes of the span of an agent that handles a message; empty if AutoGen makes a span for it, or none acts."""
    kind = cast("type[Any]", type(agent))
    is_chat = kind.__module__.startswith(_AGENTCHAT)
    if kind.__module__.startswith(_CORE) or (is_chat and kind.__name__ not in _MANAGERS):
        return {}
    return {
        semconv.OPERATION: semconv.OP_INVOKE_AGENT,
        semconv.AGENT_NAME: kind.__name__ if is_chat else str(agent.id.type),
        semconv.AGENT_ID: str(agent.id),
    }


def span_name(attributes: Mapping[str, str]) -> str:
    """The name of the span with these attributes."""
    who = attributes.get(semconv.AGENT_NAME) or attributes.get(semconv.WORKFLOW_NAME, "")
    return f"{attributes[semconv.OPERATION]} {who}"


def tool_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """A tool's arguments as JSON."""
    return {semconv.TOOL_ARGUMENTS: json.dumps(plain(dict(arguments)))}


def tool_result(tool: Any, result: Any) -> dict[str, str]:
    """A tool's result as the model reads it."""
    return {semconv.TOOL_RESULT: plain(str(tool.return_value_as_string(result)))}


def unseen_call(client: Any, capture: Capture, *, parent_id: str, start_ns: int) -> Span:
    """The span of a model call that a client made past the wire."""
    kind = cast("type[Any]", type(client))
    attributes = {semconv.OPERATION: semconv.OP_CHAT, semconv.CLIENT: f"{kind.__module__}.{kind.__qualname__}"}
    return Span(
        rollout_id=capture.rollout_id,
        attempt_id=capture.attempt_id,
        trace_id=capture.trace_id,
        span_id=new_span_id(),
        parent_id=parent_id,
        name=semconv.OP_CHAT,
        start_ns=start_ns,
        end_ns=time.time_ns(),
        status="ok",
        attributes=attributes,
    )


def handoff(published: Any, span: Any) -> dict[str, str]:
    """Source and target, if ``published`` is the message in which the agent of ``span`` hands over; else nothing."""
    message = getattr(published, "message", None)
    attributes = cast("Mapping[str, Any]", getattr(span, "attributes", None) or {})
    if not isinstance(message, HandoffMessage) or message.source != attributes.get(semconv.AGENT_NAME):
        return {}
    return {semconv.HANDOFF_SOURCE: message.source, semconv.HANDOFF_TARGET: message.target}
