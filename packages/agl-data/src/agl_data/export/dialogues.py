"""Converts recorded calls to dialogues in OpenAI's chat format for fine-tuning, one line per conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from agl.dialects import call_messages
from agl.schemas import Episode, Span
from agl_data.export.conversations import LEFT_OUT, arguments_of, function_of, objects_in
from agl_inspect.exports import chat_tools
from agl_inspect.rollouts.conversations import comparable


def dialogues(episode: Episode, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the conversations of an episode in order, each with the tools, the agent and the episode's reward.

    If a later call continues an earlier one, only the dialogue of the later call is returned, which includes the other.
    Calls without an answer are left out, and so are calls with a reject reason in ``LEFT_OUT``, such as those of other
    attempts or of agents that were not selected. Calls without token ids are kept.
    """
    calls = {span.span_id: span.call for span in spans if span.call is not None}
    kept: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    for transition in episode.transitions:
        call = calls[transition.span_id]
        messages = [] if transition.reject in LEFT_OUT or call.dialect == "embeddings" else call_messages(call)
        if not messages or messages[-1].get("role") != "assistant":
            continue
        kept = [found for found in kept if not _continues(messages, found[0])]
        about = {"rollout_id": transition.rollout_id, "agent": transition.agent, "reward": episode.reward}
        tools = chat_tools(call)
        kept.append((messages, {"messages": messages, **({"tools": tools} if tools else {}), **about}))
    return [line for _, line in kept]


def begins_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two conversations, in messages."""
    both = zip(_as_made(one), _as_made(other), strict=False)
    return next((number for number, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def _continues(messages: Sequence[Any], earlier: Sequence[Any]) -> bool:
    return len(earlier) < len(messages) and _as_made(earlier) == _as_made(messages[: len(earlier)])


def _as_made(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in a form in which an answer equals its copy in the client's next request.

    LangChain's copy adds the agent's ``name`` and changes the spaces in the arguments of tool calls.
    """
    return comparable([_answer(message) if message.get("role") == "assistant" else message for message in messages])


def _answer(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**function_of(call), "arguments": arguments_of(call)}} if function_of(call) else call
        for call in objects_in(message.get("tool_calls"))
    ]
    return {**message, "name": None, "tool_calls": calls}
