"""Converts AutoGen's objects to span attributes; no other module of this package reads them."""

from typing import Any, cast

from autogen_agentchat.messages import HandoffMessage

_MANAGERS = ("SelectorGroupChatManager", "MagenticOneOrchestrator")
"""Managers of teams that call a model themselves; matched by class name, as AutoGen does not export them."""

_AGENTCHAT = "autogen_agentchat."
_CORE = "autogen_core."


def unspoken_agent(agent: Any) -> dict[str, Any]:
    """The agent that handles a message, if AutoGen makes no span for it; else nothing."""
    kind = cast("type[Any]", type(agent))
    is_chat = kind.__module__.startswith(_AGENTCHAT)
    if kind.__module__.startswith(_CORE) or (is_chat and kind.__name__ not in _MANAGERS):
        return {}
    return {"agent": kind.__name__ if is_chat else str(agent.id.type), "agent_id": str(agent.id)}


def client_name(client: Any) -> str:
    """The class name of a model client."""
    kind = cast("type[Any]", type(client))
    return f"{kind.__module__}.{kind.__qualname__}"


def handoff(published: Any) -> dict[str, str]:
    """Source and target, if ``published`` is the message of a hand-off; else nothing."""
    message = getattr(published, "message", None)
    return {"source": message.source, "target": message.target} if isinstance(message, HandoffMessage) else {}
