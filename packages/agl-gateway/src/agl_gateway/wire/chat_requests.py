"""Builds the requests of chat completions, into which the calls of other APIs are translated.

Everything here is about chat alone. What the other APIs say is read in :mod:`agl_gateway.wire.google_requests`,
:mod:`agl_gateway.wire.messages_requests` and :mod:`agl_gateway.wire.responses_requests`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.problems import Problem

ChatMessage = dict[str, Json]

_EMPTY_SCHEMA: dict[str, Json] = {"type": "object", "properties": {}}


def fields_of(asked: Request) -> dict[str, Any]:
    """Return the fields of a request; raises a 400 :class:`Problem` for a body that is no JSON object."""
    given = asked.to_dict()
    if given is None:
        raise Problem(
            400,
            "the request's body is not a JSON object, or is nested too deep; send the API's JSON",
            code="invalid_json",
        )
    return given


def chat_completion(body: dict[str, Json], *, is_streamed: bool) -> Request:
    """Return the request; a streamed answer ends with its usage, which other APIs always report."""
    if is_streamed:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return Request("chat", msgspec.json.encode(body))


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a message that is text."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Return an image by its address, which may be one of ``data:``."""
    return {"type": "image_url", "image_url": {"url": url}}


def file_part(url: str) -> dict[str, Any]:
    """Return a file by its address of ``data:``."""
    return {"type": "file", "file": {"file_data": url}}


def audio_part(data: str, kind: str) -> dict[str, Any]:
    """Return audio in base64, of a format such as ``wav``."""
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def user_message(parts: Sequence[dict[str, Any]], *, between: str = "\n") -> Iterable[ChatMessage]:
    """Return a user's message, as one text where all parts are; none without parts."""
    if parts and all(part["type"] == "text" for part in parts):
        return [{"role": "user", "content": between.join(part["text"] for part in parts)}]
    return [{"role": "user", "content": [*parts]}] if parts else []


def assistant_message(*, text: str, reasoning: str, calls: Sequence[Json]) -> ChatMessage:
    """Return an earlier answer of the model."""
    message: ChatMessage = {"role": "assistant", "content": text or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": [*calls]} if calls else message


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    """Return a tool call of an earlier answer; ``arguments`` is its JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_messages(call_id: str, parts: Sequence[dict[str, Any]]) -> tuple[ChatMessage, list[dict[str, Any]]]:
    """Return a tool's result, which can only be text, and its other parts, for the user's message that follows it."""
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    rest = [part for part in parts if part["type"] != "text"]
    return {"role": "tool", "tool_call_id": call_id, "content": text}, rest


def function_tool(name: Json, *, description: Json = None, parameters: Json = None) -> Json:
    """Return the declaration of a tool; ``parameters`` is a JSON Schema."""
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or _EMPTY_SCHEMA}}


def function_choice(name: Json) -> Json:
    """Return the choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def answer_format(schema: Json, *, name: Json = None) -> Json:
    """Return the format of an answer that follows a JSON Schema, or any JSON object without one."""
    named = {"type": "json_schema", "json_schema": {"name": name or "answer", "schema": schema}}
    return named if schema else {"type": "json_object"}


def unsupported(found: str, advice: str) -> Problem:
    """Return the refusal of what no chat completion can ask for."""
    return Problem(400, f"the policy's server has nothing for {found}; {advice}", code="unsupported")
