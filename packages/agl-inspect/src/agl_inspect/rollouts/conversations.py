"""The messages of calls as labelled texts for people; what an earlier call has shown is told apart.

Everything here was written by agents, models and tools, and may have any shape.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import msgspec

from agl.schemas import Json, to_json


class ShownMessages:
    """Remembers the conversations of a rollout, so that each message is shown once."""

    def __init__(self) -> None:
        self._shown: set[bytes] = set()

    def add(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Add a conversation; returns how many of its messages, from the first, an earlier one began with too."""
        digests = list(_digests(comparable(messages)))
        common = sum(1 for _ in takewhile(self._shown.__contains__, digests))
        self._shown.update(digests)
        return common


def _digests(messages: Sequence[Any]) -> Iterator[bytes]:
    """Return a digest of each beginning of a conversation, the shortest first."""
    digest = b""
    for message in messages:
        text = msgspec.json.encode(message, order="sorted")
        digest = hashlib.blake2b(digest + text, digest_size=16).digest()
        yield digest


def labelled_texts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a message says, each part with its label: reasoning, content and tool calls with their arguments."""
    role = str(message.get("role", "message"))
    reasoning = [message[key] for key in ("reasoning_content", "reasoning") if message.get(key)]
    found = [(f"{role} thinks", _plain(each)) for each in reasoning]
    if message.get("content"):
        found.append((role, _plain(message["content"])))
    for call in _objects(message.get("tool_calls")):
        called = _object(call.get("function")) or _object(call.get("custom"))
        arguments = called.get("arguments", called.get("input", ""))
        found.append((f"{role} calls {called.get('name', '')}", _plain(arguments)))
    return found or [(role, "(empty)")]


def _plain(content: Any) -> str:
    """Return a content's text; parts that are no text are written as JSON."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return to_json(content).decode()
    return "\n".join(map(_part, cast("list[Any]", content)))


def _part(part: Any) -> str:
    if isinstance(part, dict) and "text" in part:
        return str(cast("dict[str, Any]", part)["text"])
    return part if isinstance(part, str) else to_json(part).decode()


def _objects(value: Any) -> list[dict[str, Any]]:
    return [_object(item) for item in cast("list[Any]", value)] if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def comparable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Return messages without their empty parts: clients differ in whether one is absent, null or empty."""
    return [{key: value for key, value in message.items() if value not in (None, "", [])} for message in messages]
