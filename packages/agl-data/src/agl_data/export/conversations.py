"""Finds the conversations of a rollout: sequences of one agent's model calls whose messages continue each other.

Calls are matched by their messages and not by their token ids, because a format made of steps holds each message only
once. A conversation may therefore hold calls of several branches of the call forest, and a branch may hold calls of
several conversations. The token ids stay with their call.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from agl.dialects import call_messages
from agl.schemas import ModelCall, Span, Transition
from agl_data.export.rows import why_left_out
from agl_data.json_values import storable
from agl_inspect.exports import Exported, Losses

LEFT_OUT = frozenset({"error", "incomplete", "superseded", "not_final", "late", "not_selected"})
"""Reject reasons for which a call is left out of all conversations."""

_NO_ANSWER = "model calls without an answer, such as those for embeddings: left out"

Message = dict[str, Any]


class Turn(NamedTuple):
    """A model call in its conversation.

    Attributes:
        span: The span that recorded the call.
        call: The call.
        seen: The call's transition in the episode.
        before: The messages of the call's request that are new in the conversation.
        answer: The message with which the model answered.
    """

    span: Span
    call: ModelCall
    seen: Transition
    before: list[Message]
    answer: Message


class Conversation:
    """The turns of a conversation in order; the first turn's request opens it."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.turns: list[Turn] = []


def conversations_of(item: Exported, losses: Losses) -> list[Conversation]:
    """Return the conversations of the deciding attempt, by first call; calls that are left out count as losses."""
    spans = {(span.attempt_id, span.span_id): span for span in item.recording.spans}
    found: list[Conversation] = []
    ends: dict[bytes, list[Conversation]] = {}
    lost: Counter[str] = Counter()
    for seen in item.episode.transitions:
        span = spans[seen.attempt_id, seen.span_id]
        call = span.call
        messages = [] if call is None or seen.reject in LEFT_OUT else _messages(call)
        if call is None or not messages:
            lost[why_left_out(seen.reject) if seen.reject in LEFT_OUT else _NO_ANSWER] += 1
            continue
        keys = _keys(seen.agent, messages)
        at = next((n for n in range(len(messages) - 1, 0, -1) if ends.get(keys[n])), 0)
        if at:
            conversation = ends[keys[at]].pop()
        else:
            conversation = Conversation(seen.agent)
            found.append(conversation)
        conversation.turns.append(Turn(span, call, seen, messages[at:-1], messages[-1]))
        ends.setdefault(keys[-1], []).append(conversation)
    for what, count in lost.items():
        losses.add(what, item.recording.rollout.rollout_id, count)
    return found


def _messages(call: ModelCall) -> list[Message]:
    """Return the messages of a call, ending with the answer; empty if the call has no answer."""
    if call.dialect == "embeddings":
        return []
    asked = len(call_messages(msgspec.structs.replace(call, response=None)))
    messages = call_messages(call)
    return messages if len(messages) > asked and messages[-1].get("role") == "assistant" else []


def _keys(agent: str, messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of every prefix of the messages, from the empty one to the whole list."""
    running = hashlib.blake2b(agent.encode("utf-8", "replace"), digest_size=16)
    keys = [running.digest()]
    for message in messages:
        running.update(msgspec.msgpack.encode(storable(_comparable(message)), order="deterministic"))
        keys.append(running.digest())
    return keys


def _comparable(message: Message) -> list[Any]:
    """Return a message in a form in which an answer equals its copy in the client's next request."""
    calls = objects_in(message.get("tool_calls"))
    asked = [[call.get("id"), function_of(call).get("name"), arguments_of(call)] for call in calls]
    content = message.get("content")
    return [message.get("role"), "" if content is None else content, asked, message.get("tool_call_id")]


def objects_in(values: Any) -> Iterator[Message]:
    """Iterate over the items of a list that are JSON objects; empty if the value is not a list."""
    items = cast("list[Any]", values) if isinstance(values, list) else []
    return (cast("Message", item) for item in items if isinstance(item, dict))


def function_of(call: Message) -> Message:
    """Return the field ``function`` of a tool call; empty if it is missing or not an object."""
    function = call.get("function")
    return cast("Message", function) if isinstance(function, dict) else {}


def arguments_of(call: Message) -> Any:
    """Return the arguments of a tool call, decoded from JSON; the raw value if it is not valid JSON."""
    arguments = function_of(call).get("arguments")
    try:
        return json.loads(arguments or "")
    except (TypeError, ValueError, RecursionError):
        return arguments
