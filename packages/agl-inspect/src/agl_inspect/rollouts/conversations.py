"""Turns the messages of calls into labelled texts for people, and describes how two conversations differ.

The messages come from agents, models and tools, and may be any JSON.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple, cast

import msgspec

from agl import semconv
from agl.dialects import call_messages
from agl.schemas import Json, Record, Span, to_json
from agl_inspect.text import short

DIGEST = "sha256:"
"""The beginning of a reference to a stored blob."""

_REFERENCES = ("url", "data", "file_data", "file_id")
_SHOWN = 12


class ShownMessages:
    """Remembers the conversations of a rollout, so that each message is shown once."""

    def __init__(self) -> None:
        self._shown: set[bytes] = set()

    def add(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Add a conversation; return the number of first messages that it shares with an earlier conversation."""
        digests = list(_digests(comparable(messages)))
        common = sum(1 for _ in takewhile(self._shown.__contains__, digests))
        self._shown.update(digests)
        return common


_LABELS = {
    semconv.TOOL_ARGUMENTS: "arguments",
    semconv.TOOL_RESULT: "result",
    semconv.MESSAGE: "message",
    semconv.OBJECT: "object",
    semconv.OBSERVATION_CONTENT: "says",
    semconv.OUTPUT: "returned",
}
_UNRECORDED = {semconv.INPUT_MESSAGES: "input", semconv.OUTPUT_MESSAGES: "output"}
"""Attributes in which a framework reports the messages of a call that was not recorded."""

_STACKTRACE = "exception.stacktrace"


class SpanText(NamedTuple):
    """A text of a span, with a label and a role: a message's role, ``error`` for a traceback, else ``""``."""

    role: str
    label: str
    value: Any


def contents_of(span: Span, shown: ShownMessages) -> tuple[int, list[SpanText]]:
    """Return the number of a call's first messages that were shown before, and the span's other texts."""
    labels = _LABELS if span.call else {**_LABELS, **_UNRECORDED}
    texts = [SpanText("", label, span.attributes[name]) for name, label in labels.items() if name in span.attributes]
    messages = call_messages(span.call) if span.call else []
    repeated = shown.add(messages)
    for message in messages[repeated:]:
        role = str(message.get("role", "message"))
        texts += [SpanText(role, label, text) for label, text in labelled_texts(message)]
    if span.reward is not None and span.reward.feedback:
        texts.append(SpanText("", "feedback", span.reward.feedback))
    traces = [event.attributes[_STACKTRACE] for event in span.events if _STACKTRACE in event.attributes]
    return repeated, texts + [SpanText("error", "traceback", trace) for trace in traces]


def _digests(messages: Sequence[Any]) -> Iterator[bytes]:
    """Yield the digest of every prefix of a conversation, the shortest prefix first."""
    digest = b""
    for message in messages:
        text = msgspec.json.encode(message, order="sorted")
        digest = hashlib.blake2b(digest + text, digest_size=16).digest()
        yield digest


class MessageParts(NamedTuple):
    """The texts of a message; ``tools`` has the id, the name and the arguments of each tool call."""

    thinking: str
    content: str
    tools: list[tuple[str, str, str]]


def parts_of(message: Mapping[str, Any]) -> MessageParts:
    """Return the parts of a message as texts; empty for parts that it lacks."""
    reasoning, content = message.get("reasoning_content") or message.get("reasoning"), message.get("content")
    tools: list[tuple[str, str, str]] = []
    for call in objects(message.get("tool_calls")):
        called = _object(call.get("function")) or _object(call.get("custom"))
        arguments = called.get("arguments", called.get("input", ""))
        tools.append((str(call.get("id", "")), str(called.get("name", "")), _plain(arguments)))
    return MessageParts(_plain(reasoning) if reasoning else "", _plain(content) if content else "", tools)


def labelled_texts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the parts of a message as ``(label, text)``: reasoning, content, and tool calls with arguments."""
    role, parts = str(message.get("role", "message")), parts_of(message)
    found = [(label, text) for label, text in ((f"{role} thinks", parts.thinking), (role, parts.content)) if text]
    found += [(f"{role} calls {name}", arguments) for _, name, arguments in parts.tools]
    return found or [(role, "(empty)")]


def _plain(content: Any) -> str:
    """Return the text of a message's content: media as their reference in brackets, and other parts as JSON."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return to_json(content).decode()
    return "\n".join(map(_part, cast("list[Any]", content)))


def _part(part: Any) -> str:
    if isinstance(part, dict) and "text" in part:
        return str(cast("dict[str, Any]", part)["text"])
    if media := _media(part):
        return f"[{media.kind} {media.reference.removeprefix(DIGEST)[:_SHOWN] if media.is_stored else media.reference}]"
    return part if isinstance(part, str) else to_json(part).decode()


class MediaPart(Record, frozen=True, kw_only=True):
    """A picture or other media in a message: its kind, such as ``image``, and the digest of its blob, or its URL."""

    kind: str
    reference: str

    @property
    def is_stored(self) -> bool:
        """True if the reference is a digest."""
        return self.reference.startswith(DIGEST)


def media_of(message: Mapping[str, Any]) -> list[MediaPart]:
    """Return the pictures and other media of a recorded message, in order."""
    return [media for part in objects(message.get("content")) if (media := _media(part))]


def _media(part: Any) -> MediaPart | None:
    given = _object(part)
    kind = str(given.get("type", ""))
    inner = _object(given.get(kind))
    reference = next((each for key in _REFERENCES if isinstance(each := inner.get(key), str)), None)
    short_kind = kind.removeprefix("input_").removesuffix("_url")
    return None if reference is None else MediaPart(kind=short_kind, reference=reference)


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the items of a JSON list, with ``{}`` for items that are not objects; ``[]`` for any other value."""
    return [_object(item) for item in cast("list[Any]", value)] if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def comparable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Return messages without empty fields, which some clients omit and others send as null."""
    return [{key: value for key, value in message.items() if value not in (None, "", [])} for message in messages]


_CONTEXT = 24
_LIMIT = 100
_NOTHING = "nothing"


def difference(then: Any, now: Any) -> str:
    """Return ``was A, is B``, with both values cut to the differing part and a little context."""
    if not (isinstance(then, str) and isinstance(now, str)):
        return f"was {_whole(then)}, is {_whole(now)}"
    same = takewhile(lambda pair: pair[0] == pair[1], zip(then, now, strict=False))
    start = max(0, sum(1 for _ in same) - _CONTEXT)
    return f"was {_cut(then, start)}, is {_cut(now, start)}"


def nearest(asked: Sequence[Any], recorded: Sequence[Sequence[Any]]) -> str:
    """Describe the first difference between a request and the most similar recorded one; ``""`` without a recording."""
    if not recorded:
        return ""
    best = max(recorded, key=lambda messages: (_shared(asked, messages), -abs(len(messages) - len(asked))))
    for number, (now, then) in enumerate(zip_longest(asked, best), start=1):
        if now != then:
            role = _role(now) or _role(then)
            return f"message {number} ({role}) {difference(_content(then), _content(now))}"
    return "the request was recorded, and made fewer times"


def ending(messages: Sequence[Mapping[str, Any]]) -> str:
    """Describe a conversation by its last message, on one line."""
    if not messages:
        return "an empty conversation"
    return f"{_role(messages[-1])}: {short(messages[-1].get('content'), 120)}"


def _role(message: Mapping[str, Any] | None) -> str:
    return str(message.get("role", "")) if message else ""


def _content(message: Mapping[str, Any] | None) -> Any:
    if message is None:
        return None
    rest = {key: value for key, value in message.items() if key != "role"}
    return rest["content"] if set(rest) == {"content"} else rest


def _whole(value: Any) -> str:
    if isinstance(value, str):
        return _cut(value, 0)
    return _NOTHING if value is None else short(value, _LIMIT)


def _cut(text: str, start: int) -> str:
    return repr(("…" if start else "") + short(text[start:], _LIMIT)) if text else _NOTHING


def _shared(asked: Sequence[Any], recorded: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, recorded, strict=False)))
