"""Builds chat completion requests and reads their answers, for the client APIs that are translated into them.

An answer is cut into pieces in their order: thoughts, texts and tool calls. A tool call is emitted whole, at the end of
the answer, because servers may interleave the parts of several calls. Of several choices, only the first is read.

A message and its tool calls may have further fields, which the server wants back with the next request: thoughts under
one of several names or in Mistral's content, OpenRouter's ``reasoning_details``, or Gemini's ``extra_content``. The
pieces of thoughts hold these fields for their seal; where an answer has no thoughts, an empty piece holds them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeAlias

import msgspec

from agl.dialects import Request, StreamedCalls, StreamedMessage
from agl.schemas import Json, Usage
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.translation import EventSplitter, as_object, data_of, objects_in, text_in, thoughts_in

ChatMessage = dict[str, Json]

_EMPTY_SCHEMA: dict[str, Json] = {"type": "object", "properties": {}}


def fields_of(asked: Request) -> dict[str, Any]:
    """Return the fields of a request; raises a 400 :class:`Problem` if the body is not a JSON object."""
    given = asked.to_dict()
    if given is None:
        raise Problem(
            400,
            "the request's body is not a JSON object, or is nested too deep; send the API's JSON",
            code="invalid_json",
        )
    return given


def chat_completion(body: dict[str, Json], *, is_streamed: bool) -> Request:
    """Return a chat completion request; a streamed one asks for usage, which the other APIs always report."""
    if is_streamed:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return Request("chat", msgspec.json.encode(body))


def text_part(text: str) -> dict[str, Any]:
    """Return a message part that holds text."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Return a message part that holds an image; ``url`` may be a ``data:`` URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def file_part(url: str) -> dict[str, Any]:
    """Return a message part that holds a file; ``url`` is a ``data:`` URL."""
    return {"type": "file", "file": {"file_data": url}}


def audio_part(data: str, kind: str) -> dict[str, Any]:
    """Return a message part that holds audio: ``data`` is base64, ``kind`` a format such as ``wav``."""
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def user_message(parts: Sequence[dict[str, Any]], *, between: str = "\n") -> Iterable[ChatMessage]:
    """Return a list with one user message that holds ``parts``; empty without parts.

    If all parts are text, the content is one string.
    """
    if parts and all(part["type"] == "text" for part in parts):
        return [{"role": "user", "content": between.join(part["text"] for part in parts)}]
    return [{"role": "user", "content": [*parts]}] if parts else []


def assistant_message(*, text: str, thoughts: Iterable[dict[str, Any]], calls: Sequence[dict[str, Any]]) -> ChatMessage:
    """Return the assistant message for an earlier answer; ``thoughts`` are the fields of its pieces of thoughts."""
    message = together(thoughts)
    further = {text_in(call.get("id")): call for call in objects_in(message.pop("tool_calls", None))}
    thinking = objects_in(message.get("content"))
    message |= {
        "role": "assistant",
        "content": [*thinking, text_part(text)] if thinking and text else thinking or text or None,
    }
    return {**message, "tool_calls": [{**further.get(call["id"], {}), **call} for call in calls]} if calls else message


def together(thoughts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of several pieces of thoughts as fields of one message: their texts and lists in order.

    A field that is neither text nor a list has the value of the last piece.
    """
    found: dict[str, list[Any]] = {}
    for key, value in chain.from_iterable(one.items() for one in thoughts):
        found.setdefault(key, []).append(value)
    return {key: _sum(values) for key, values in found.items()}


def _sum(values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    return [*chain.from_iterable(values)] if all(isinstance(value, list) for value in values) else values[-1]


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of an assistant message's ``tool_calls``; ``arguments`` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_messages(call_id: str, parts: Sequence[dict[str, Any]]) -> tuple[ChatMessage, list[dict[str, Any]]]:
    """Return the tool message with the text of a tool's result, and the parts that are not text.

    The other parts belong in the user message that follows.
    """
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    rest = [part for part in parts if part["type"] != "text"]
    return {"role": "tool", "tool_call_id": call_id, "content": text}, rest


def function_tool(name: Json, *, description: Json = None, parameters: Json = None) -> Json:
    """Return the declaration of a tool; ``parameters`` is a JSON Schema."""
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or _EMPTY_SCHEMA}}


def function_choice(name: Json) -> Json:
    """Return the ``tool_choice`` that requires the function ``name``."""
    return {"type": "function", "function": {"name": name}}


def answer_format(schema: Json, *, name: Json = None) -> Json:
    """Return the ``response_format`` for answers that follow a JSON Schema; without a schema, for any JSON object."""
    named = {"type": "json_schema", "json_schema": {"name": name or "answer", "schema": schema}}
    return named if schema else {"type": "json_object"}


def unsupported(found: str, advice: str) -> Problem:
    """Return the 400 for a request that cannot be expressed as a chat completion."""
    return Problem(400, f"the policy's server has nothing for {found}; {advice}", code="unsupported")


Kind: TypeAlias = Literal["thought", "text", "call"]
Step: TypeAlias = Literal["opened", "grown", "closed"]


@dataclass(slots=True)
class Piece:
    """A thought, text or tool call in an answer.

    Attributes:
        parts: The parts of the text so far; for a call, of the JSON text of its arguments.
        id: The id of a call.
        name: The name of a call's function.
        fields: The fields of the message that a closed piece of thoughts has to bring back, in the form of a delta.
    """

    kind: Kind
    parts: list[str] = field(default_factory=list[str])
    id: str = ""
    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.parts)


Change: TypeAlias = tuple[Step, Piece, str]
"""What happened to a piece of an answer (opened, grown, closed), the piece, and the text that was added."""

_EXTRA = "extra_content"
_SEALED = frozenset(("reasoning", "reasoning_content", "reasoning_details", _EXTRA))
"""Fields of a message that the server wants back, with thoughts within the content."""


class Pieces:
    """Splits one choice into pieces, from its message or from its deltas."""

    def __init__(self) -> None:
        self._open: Piece | None = None
        self._calls = StreamedCalls()
        self._fields = StreamedMessage()  # of this answer, and in no closed piece yet

    def add(self, delta: dict[str, Any]) -> Iterator[Change]:
        """Read a message or a delta, and yield the changes of pieces that it causes."""
        fields = {key: delta[key] for key in delta.keys() & _SEALED if delta[key]}
        thoughts = thoughts_in(delta)
        parts: list[dict[str, Any]] = []
        if isinstance(delta.get("content"), list):
            parts = objects_in(delta["content"])
            if thinking := [part for part in parts if part.get("type") == "thinking"]:
                fields["content"] = thinking
                thoughts = thoughts or "".join(_text(objects_in(part.get("thinking"))) for part in thinking)
        if fields:
            self._fields.add(fields)
        if thoughts or (fields and self._open is None):
            yield from self._grow("thought", thoughts)
        if text := text_in(delta.get("content")) or text_in(delta.get("refusal")) or _text(parts):
            yield from self._grow("text", text)
        if calls := delta.get("tool_calls"):
            self._calls.add(calls)

    def end(self) -> Iterator[Change]:
        """Close the open piece, then open and close each tool call; yields these changes."""
        calls, self._calls = self._calls.whole(), StreamedCalls()
        if further := [{"id": call.get("id"), _EXTRA: call[_EXTRA]} for call in calls if call.get(_EXTRA)]:
            self._fields.add({"tool_calls": further})
        if self._fields.whole():
            yield from self._grow("thought", "")
        yield from self._close()
        for given in calls:
            function = given["function"]
            call = Piece("call", [function["arguments"]], id=text_in(given.get("id")), name=function["name"])
            yield "opened", call, ""
            if call.text:
                yield "grown", call, call.text
            yield "closed", call, ""

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            self._open = Piece(kind)
            yield "opened", self._open, ""
        if text:
            self._open.parts.append(text)
            yield "grown", self._open, text

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            if self._open.kind == "thought":
                self._open.fields, self._fields = self._fields.whole(), StreamedMessage()
            yield "closed", self._open, ""
        self._open = None


def _text(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(text_in(part.get("text")) for part in parts)


def pieces_of(message: dict[str, Any]) -> list[Piece]:
    """Return the pieces of a message that is complete."""
    building = Pieces()
    return [piece for step, piece, _ in (*building.add(message), *building.end()) if step == "closed"]


def usage_of(given: dict[str, Any]) -> Usage:
    """Return the token usage in an answer or a chunk; zeros if it reports none."""
    return Usage.read(given.get("usage"))


def first_choice(given: dict[str, Any]) -> dict[str, Any]:
    """Return the choice with index 0 in an answer or a chunk; an empty object if there is none."""
    return next((one for one in objects_in(given.get("choices")) if not one.get("index")), dict[str, Any]())


def error_in(given: dict[str, Any], body: bytes = b"") -> tuple[str, str]:
    """Return the message and code of a server's error in any format; without a message, the start of ``body``."""
    error = given.get("error")
    found = as_object(error).get("message") or error or given.get("message") or given.get("detail")
    text = str(found or body[:2000].decode("utf-8", "replace"))
    code = text_in(as_object(error).get("code"))
    is_too_long = "context length" in text or "context_length" in code
    return text, "context_length_exceeded" if is_too_long else code


class ChatEvents:
    """Reads a streamed chat completion.

    Attributes:
        head: The fields of the first chunk.
        usage: The usage; zeros until it arrives.
        reason: The finish reason; ``""`` before the end.
        stop: The stop sequence that ended the answer, if the server names it.
    """

    def __init__(self) -> None:
        self._events = EventSplitter()
        self._pieces = Pieces()
        self.head: dict[str, Any] = {}
        self.usage = Usage()
        self.reason = ""
        self.stop = ""

    def chunks(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the chunks that are complete once ``data`` has arrived."""
        for event in self._events.feed(data):
            chunk = data_of(event)
            if not chunk:
                continue
            self.head = self.head or chunk
            if chunk.get("usage"):
                self.usage = usage_of(chunk)
            yield chunk

    def changes(self, chunk: dict[str, Any]) -> Iterator[Change]:
        """Yield the changes of pieces that a chunk causes."""
        choice = first_choice(chunk)
        yield from self._pieces.add(as_object(choice.get("delta")))
        self.stop = text_in(choice.get("stop_reason")) or self.stop
        if reason := text_in(choice.get("finish_reason")):
            self.reason = reason
            yield from self._pieces.end()
