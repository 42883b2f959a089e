"""The messages of a model call in the form of OpenTelemetry's GenAI conventions, from any dialect."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from agl.dialects import call_messages
from agl.schemas import Json, ModelCall

INPUT, OUTPUT, TOOLS = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions"


def message_attributes(call: ModelCall) -> dict[str, Json]:
    """Return a call's messages and tools as attributes that hold JSON, which is how span attributes carry them.

    Leaves out those that are nested too deeply for JSON to be written.
    """
    asked = call_messages(msgspec.structs.replace(call, response=None))
    whole = call_messages(call)
    answered = whole[len(asked) :] or (whole[-1:] if whole != asked else [])
    outputs = [{**_message(message), "finish_reason": call.finish_reason or "unknown"} for message in answered]
    request: Any = call.request
    tools = cast("dict[str, Json]", request).get("tools") if isinstance(request, dict) else None
    found = {INPUT: [_message(message) for message in asked], OUTPUT: outputs, TOOLS: tools}
    texts: dict[str, Json] = {name: _text(value) for name, value in found.items() if value}
    return {name: text for name, text in texts.items() if text}


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return ""


def _message(message: Mapping[str, Any]) -> dict[str, Json]:
    role = str(message.get("role", "user"))
    if role == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}
        return {"role": role, "parts": [answer]}
    return {"role": role, "parts": [*_parts(message.get("content")), *_tool_calls(message.get("tool_calls"))]}


def _parts(content: Any) -> Iterator[dict[str, Json]]:
    if isinstance(content, str) and content:
        yield {"type": "text", "content": content}
    for part in _objects(content):
        if part.get("type") == "text":
            yield {"type": "text", "content": part.get("text")}
        elif part.get("type") == "image_url":
            url = part.get("image_url")
            yield {"type": "uri", "modality": "image", "uri": url.get("url") if isinstance(url, dict) else url}  # pyright: ignore[reportUnknownMemberType]  # any JSON
        else:
            yield dict(part)


def _tool_calls(calls: Any) -> Iterator[dict[str, Json]]:
    for call in _objects(calls):
        function: Any = call.get("function")
        named = cast("dict[str, Json]", function) if isinstance(function, dict) else {}
        arguments = _parsed(named.get("arguments"))
        yield {"type": "tool_call", "id": call.get("id"), "name": named.get("name"), "arguments": arguments}


def _parsed(arguments: Any) -> Json:
    """Return the arguments as a JSON value, or as their text where they are no JSON or too deep."""
    try:
        return msgspec.json.decode(arguments)
    except (TypeError, ValueError, RecursionError, msgspec.DecodeError):
        return arguments


def _objects(values: Any) -> Sequence[Mapping[str, Any]]:
    items = cast("list[Any]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]
