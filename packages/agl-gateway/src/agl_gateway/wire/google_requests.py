"""Reads requests of Google's ``generateContent`` as chat completions, which servers of policies understand.

Tool calls keep their ids and the exact text of their arguments, which :mod:`agl_gateway.wire.google_answers` seals in
``thoughtSignature``, so that the next prompt continues the tokens of the last one. Like Google's API, this takes one
object in place of a list of one. What a policy's server cannot do is refused: Google's own tools, cached contents,
files by their address other than images, and answers that are no text or JSON. ``safetySettings``, ``labels``,
``thinkingConfig`` and ``responseLogprobs`` have no effect on it.
"""

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat_requests import (
    answer_format,
    assistant_message,
    audio_part,
    chat_completion,
    fields_of,
    file_part,
    function_tool,
    image_part,
    text_part,
    tool_call,
    unsupported,
    user_message,
)
from agl_gateway.wire.sealed import Unsealer
from agl_gateway.wire.translation import as_object, objects_in, text_in

_NUMBERS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "candidateCount": "n",
}
_INNER = ("items", "anyOf", "prefixItems", "additionalProperties")
"""Fields of a schema that hold schemas."""

_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}


def chat_request(asked: Request, *, model: str, is_streamed: bool) -> Request:
    """Return a chat completion's request.

    Raises:
        Problem: 400 for a body that is no JSON object, or asks for something that no policy's server has.
    """
    given = _camel_object(fields_of(asked))
    if given.get("cachedContent"):
        raise unsupported("cachedContent", "send the contents themselves")
    body: dict[str, Json] = {"model": model, "messages": messages_of(given)}
    body |= _tools(given) | _generation(_camel_object(given.get("generationConfig")))
    return chat_completion(body, is_streamed=is_streamed)


def messages_of(given: dict[str, Any]) -> list[dict[str, Json]]:
    """Return the system instruction and the contents as chat messages."""
    system = given.get("systemInstruction")
    text = system if isinstance(system, str) else _text(_listed(as_object(system).get("parts")))
    messages: list[dict[str, Json]] = [{"role": "system", "content": text}] if text else []
    contents, calls, unsealer = given.get("contents"), _Calls(), Unsealer()
    listed = [{"parts": [{"text": contents}]}] if isinstance(contents, str) else _listed(contents)
    for content in listed:
        parts = _parts(content.get("parts"))
        if content.get("role") == "model":
            messages.append(_assistant(parts, calls, unsealer))
        else:
            messages += _user(parts, calls)
    return messages


class _Calls:
    """Names tool calls that came without an id, and finds the call that a result belongs to."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def add(self, call: dict[str, Any]) -> str:
        self._count += 1
        call_id = text_in(call.get("id")) or f"call_{self._count}"
        self._open.append((text_in(call.get("name")), call_id))
        return call_id

    def answered(self, result: dict[str, Any]) -> str:
        name, given = text_in(result.get("name")), text_in(result.get("id"))
        known = next((one for one in self._open if given == one[1]), None)
        found = known or next((one for one in self._open if name == one[0]), None)
        if found is None:
            return given or name
        self._open.remove(found)
        return found[1]


def _assistant(parts: list[dict[str, Any]], calls: _Calls, unsealer: Unsealer) -> dict[str, Json]:
    said = [part for part in parts if "functionCall" not in part and not part.get("thought")]
    sealed = [as_object(unsealer.read(part.get("thoughtSignature"))) for part in parts]
    reasoning = next((text for one in sealed if (text := text_in(one.get("reasoning")))), "")
    reasoning = reasoning or _text([part for part in parts if part.get("thought")])
    called = [
        _call(as_object(part["functionCall"]), one, calls)
        for part, one in zip(parts, sealed, strict=True)
        if "functionCall" in part
    ]
    return assistant_message(text=_text(said), reasoning=reasoning, calls=called)


def _call(call: dict[str, Any], sealed: dict[str, Any], calls: _Calls) -> Json:
    exact, given = text_in(sealed.get("arguments")), as_object(call.get("args"))
    arguments = exact if exact and _parsed(exact) == given else msgspec.json.encode(given).decode()
    return tool_call(calls.add(call), text_in(call.get("name")), arguments)


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _user(parts: list[dict[str, Any]], calls: _Calls) -> Iterator[dict[str, Json]]:
    """Yield the results of functions, then the user's words with the media of the results before them."""
    media: list[dict[str, Any]] = []
    for part in parts:
        if result := as_object(part.get("functionResponse")):
            yield {"role": "tool", "tool_call_id": calls.answered(result), "content": _result(result.get("response"))}
            media += _parts(result.get("parts"))
    rest = [one for part in (*media, *parts) if (one := _chat_part(part)) is not None]
    yield from user_message(rest, between="")


def _result(response: Any) -> str:
    """Return a tool's result as text: the text itself where the client wrapped nothing else."""
    fields = as_object(response)
    only = next(iter(fields.values())) if len(fields) == 1 and fields.keys() <= {"output", "result"} else None
    return only if isinstance(only, str) else msgspec.json.encode(response).decode()


def _chat_part(part: dict[str, Any]) -> dict[str, Any] | None:
    if "text" in part:
        return text_part(text_in(part["text"]))
    if inline := _camel_object(part.get("inlineData")):
        kind, data = text_in(inline.get("mimeType")), text_in(inline.get("data"))
        if kind.startswith("audio/"):
            return audio_part(data, kind.removeprefix("audio/"))
        url = f"data:{kind};base64,{data}"
        return image_part(url) if kind.startswith("image/") else file_part(url)
    if held := _camel_object(part.get("fileData")):
        kind = text_in(held.get("mimeType"))
        if kind and not kind.startswith("image/"):
            raise unsupported(f"a file of type {kind[:80]!r} by its address", "send its content as inlineData")
        return image_part(text_in(held.get("fileUri")))
    return None


def _text(parts: list[dict[str, Any]]) -> str:
    return "".join(text_in(part.get("text")) for part in parts)


def _tools(given: dict[str, Any]) -> dict[str, Json]:
    declared: list[dict[str, Any]] = []
    for tool in map(_camel_object, _listed(given.get("tools"))):
        foreign = next((key for key, value in tool.items() if key != "functionDeclarations" and value is not None), "")
        if foreign:
            raise unsupported(f"the tool {foreign}", "declare functions only")
        declared += map(_camel_object, _listed(tool.get("functionDeclarations")))
    config = _camel_object(_camel_object(given.get("toolConfig")).get("functionCallingConfig"))
    allowed = config.get("allowedFunctionNames")
    kept = [one for one in declared if not isinstance(allowed, list) or not allowed or one.get("name") in allowed]
    if not kept:
        return {}
    choice = _MODES.get(text_in(config.get("mode")).upper())
    return {"tools": [_function(one) for one in kept], **({"tool_choice": choice} if choice else {})}


def _function(declared: dict[str, Any]) -> Json:
    schema = declared.get("parametersJsonSchema") or _schema(declared.get("parameters"))
    return function_tool(declared.get("name"), description=declared.get("description"), parameters=schema)


def _schema(schema: Any) -> Any:
    """Return a schema of Google's as JSON Schema, whose types are in lower case."""
    if isinstance(schema, list):
        return [_schema(item) for item in objects_in(cast("list[Any]", schema))]
    fields = as_object(schema)
    found: dict[str, Any] = {}
    for key, value in ((_camel(key), value) for key, value in fields.items()):
        if key == "type" and isinstance(value, str):
            found[key] = value.lower()
        elif key == "properties":
            found[key] = {name: _schema(one) for name, one in as_object(value).items()}
        elif key in _INNER and isinstance(value, dict | list):
            found[key] = _schema(value)
        else:
            found[key] = value
    return found


def _generation(config: dict[str, Any]) -> dict[str, Json]:
    body = {ours: _whole(config[theirs]) for theirs, ours in _NUMBERS.items() if config.get(theirs) is not None}
    form = text_in(config.get("responseMimeType"))
    if form not in ("", "text/plain", "application/json"):
        raise unsupported(f"responseMimeType {form[:80]!r}", "ask for text/plain or application/json")
    if form == "application/json":
        schema = config.get("responseJsonSchema") or _schema(config.get("responseSchema"))
        body["response_format"] = answer_format(schema)
    return body


def _whole(value: Any) -> Any:
    """Return a number such as 20.0, which Google's clients write for ``topK``, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list, or the one that stands in its place."""
    found = as_object(value)
    return [found] if found else objects_in(value)


def _parts(value: Any) -> list[dict[str, Any]]:
    return [_camel_object(part) for part in _listed(value)]


def _camel(key: str) -> str:
    head, *tail = key.split("_")
    return head + "".join(word.capitalize() for word in tail)


def _camel_object(value: Any) -> dict[str, Any]:
    """Return an object with its names as the API writes them; it also reads those of Python."""
    return {_camel(key): one for key, one in as_object(value).items()}
