"""Translates calls of Google's ``generateContent`` to chat completions, which the policies' servers understand.

Tool calls keep their ids and the exact text of their arguments. Answers seal both in ``thoughtSignature``, with the
thoughts and what else the server wants back, so that the next prompt continues the tokens of the last one. As in
Google's API, a single object may stand in place of a list. Requests for features that no policy's server has are
refused: Google's own tools, cached contents, files by URL other than images, and answers in formats other than text and
JSON. ``safetySettings``, ``labels``, ``thinkingConfig`` and ``responseLogprobs`` have no effect.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat import (
    Piece,
    Pieces,
    answer_format,
    assistant_message,
    audio_part,
    chat_completion,
    error_in,
    fields_of,
    file_part,
    function_tool,
    image_part,
    text_part,
    together,
    tool_call,
    unsupported,
    usage_of,
    user_message,
)
from agl_gateway.wire.problems import google_error
from agl_gateway.wire.thoughts import FIELDS, Unsealer, message_fields, seal
from agl_gateway.wire.translation import ClientApi, EventSplitter, as_object, data_of, object_of, objects_in, text_in

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
"""Fields of a Google schema that contain schemas."""

_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}


def chat_request(asked: Request, *, model: str, is_streamed: bool) -> Request:
    """Return the request as a chat completion.

    Raises:
        Problem: 400 if the body is not a JSON object, or asks for a feature that no policy's server has.
    """
    given = _camel_object(fields_of(asked))
    if given.get("cachedContent"):
        raise unsupported("cachedContent", "send the contents themselves")
    body: dict[str, Json] = {"model": model, "messages": messages_of(given)}
    body |= _tools(given) | _generation(_camel_object(given.get("generationConfig")))
    return chat_completion(body, is_streamed=is_streamed)


def messages_of(given: dict[str, Any]) -> list[dict[str, Json]]:
    """Return the system instruction and the contents of Google's request as chat messages."""
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
    """Gives ids to tool calls that came without one, and finds the call that a result belongs to."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def add(self, call: dict[str, Any], sealed: dict[str, Any]) -> str:
        self._count += 1
        call_id = text_in(call.get("id")) or text_in(sealed.get("id")) or f"call_{self._count}"
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
    shown = _text([part for part in parts if part.get("thought")])
    called = [
        _call(as_object(part["functionCall"]), one, calls)
        for part, one in zip(parts, sealed, strict=True)
        if "functionCall" in part
    ]
    carrier = next((one for one in sealed if FIELDS in one), dict[str, Any]())
    return assistant_message(text=_text(said), thoughts=[message_fields(carrier, shown)], calls=called)


def _call(call: dict[str, Any], sealed: dict[str, Any], calls: _Calls) -> dict[str, Any]:
    exact, given = text_in(sealed.get("arguments")), as_object(call.get("args"))
    arguments = exact if exact and _parsed(exact) == given else msgspec.json.encode(given).decode()
    return tool_call(calls.add(call, sealed), text_in(call.get("name")), arguments)


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _user(parts: list[dict[str, Any]], calls: _Calls) -> Iterator[dict[str, Json]]:
    """Yield the function results as tool messages, then one user message with all other parts.

    That message holds the media of the results and the user's own parts.
    """
    media: list[dict[str, Any]] = []
    for part in parts:
        if result := as_object(part.get("functionResponse")):
            yield {"role": "tool", "tool_call_id": calls.answered(result), "content": _result(result.get("response"))}
            media += _parts(result.get("parts"))
    rest = [one for part in (*media, *parts) if (one := _chat_part(part)) is not None]
    yield from user_message(rest, between="")


def _result(response: Any) -> str:
    """Return a tool's result as text: a string that the client wrapped in one field, else the JSON of the result."""
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
    """Return a Google schema as JSON Schema, whose type names are in lower case."""
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
    """Return a number such as 20.0, which Google's clients write for ``topK``, as an integer; others unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; a single object counts as a list of one."""
    found = as_object(value)
    return [found] if found else objects_in(value)


def _parts(value: Any) -> list[dict[str, Any]]:
    return [_camel_object(part) for part in _listed(value)]


def _camel(key: str) -> str:
    head, *tail = key.split("_")
    return head + "".join(word.capitalize() for word in tail)


def _camel_object(value: Any) -> dict[str, Any]:
    """Return an object with its keys in camel case, as Google's API writes them; the Python client sends snake case."""
    return {_camel(key): one for key, one in as_object(value).items()}


_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


class GoogleTranslation:
    """Translates a call of ``generateContent`` or ``streamGenerateContent`` to a chat completion, and the answer back.

    Args:
        model: The model that the path names.
        is_streamed: True if the answer is streamed.
        is_sse: True to stream events (``alt=sse``), false to stream the elements of a JSON array.
    """

    client_api: ClientApi = "google"
    dropped: tuple[str, ...] = ()

    def __init__(self, *, model: str, is_streamed: bool, is_sse: bool) -> None:
        self._model = model
        self._is_streamed = is_streamed
        self._is_sse = is_sse
        self.content_type = "text/event-stream" if is_sse else "application/json"

    def asked(self, request: Request) -> Request:
        """Return the request as a chat completion."""
        return chat_request(request, model=self._model, is_streamed=self._is_streamed)

    def answer(self, body: bytes) -> bytes:
        """Translate a complete (not streamed) chat completion to a response of ``generateContent``."""
        given = object_of(body)
        candidates = [_answer_of(choice) for choice in objects_in(given.get("choices"))]
        return msgspec.json.encode({"candidates": candidates, **_about(given, self._model)})

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error of the policy's server in Google's format, with the server's message."""
        message, _ = error_in(object_of(body), body)
        return google_error(status, message)

    def stream(self) -> "GoogleStream":
        """Return a translator for the streamed answer."""
        return GoogleStream(self._model, is_sse=self._is_sse)


def _answer_of(choice: dict[str, Any]) -> dict[str, Json]:
    message, building = as_object(choice.get("message")), _Candidate()
    parts = [*building.delta(message), *building.end()]
    reason = _REASONS.get(text_in(choice.get("finish_reason")), "OTHER")
    return {"content": {"role": "model", "parts": parts}, "finishReason": reason, "index": choice.get("index", 0)}


def _about(given: dict[str, Any], model: str) -> dict[str, Json]:
    found = dict[str, Json]()
    if given.get("usage"):
        usage = usage_of(given)
        found["usageMetadata"] = {
            "promptTokenCount": usage.prompt,
            **({"cachedContentTokenCount": usage.cached} if usage.cached else {}),
            **({"thoughtsTokenCount": usage.thoughts} if usage.thoughts else {}),
            "candidatesTokenCount": max(0, usage.answer - usage.thoughts),
            "totalTokenCount": usage.prompt + usage.answer,
        }
    return {**found, "modelVersion": text_in(given.get("model")) or model, "responseId": text_in(given.get("id"))}


class _Candidate:
    """Splits one candidate into Google's parts, from a message or its deltas."""

    def __init__(self) -> None:
        self._pieces = Pieces()
        self._fields: list[dict[str, Any]] = []

    def delta(self, delta: dict[str, Any]) -> Iterator[dict[str, Json]]:
        for step, piece, text in self._pieces.add(delta):
            self._add(piece)
            if step == "grown":
                yield {"text": text, "thought": True} if piece.kind == "thought" else {"text": text}

    def end(self) -> Iterator[dict[str, Json]]:
        """Yield the parts for the tool calls; the first one, or else one without text, has the sealed thoughts."""
        for step, piece, _ in self._pieces.end():
            self._add(piece)
            if step == "closed" and piece.kind == "call":
                called = {"id": piece.id, "name": piece.name, "args": object_of(piece.text.encode())}
                signature = seal({"id": piece.id, "arguments": piece.text, **self._unsealed()})
                yield {"functionCall": called, "thoughtSignature": signature}
        if fields := self._unsealed():
            yield {"text": "", "thoughtSignature": seal(fields)}

    def _unsealed(self) -> dict[str, Json]:
        fields, self._fields = together(self._fields), []
        return {FIELDS: fields} if fields else {}

    def _add(self, piece: Piece) -> None:
        if piece.fields:  # a closed piece of thoughts
            self._fields.append(piece.fields)


class GoogleStream:
    """Translates a streamed chat completion; each event becomes one answer with the new parts.

    The end of a candidate is held back until the usage arrives, because clients expect both in the last answer.
    """

    def __init__(self, model: str, *, is_sse: bool) -> None:
        self._model = model
        self._is_sse = is_sse
        self._events = EventSplitter()
        self._candidates: dict[int, _Candidate] = {}
        self._ended: dict[int, Json] = {}
        self._last: dict[str, Json] = {}
        self._count = 0
        self._is_failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the client's bytes for the events that are complete once ``chunk`` has arrived."""
        return b"".join(self._answer(data_of(event)) for event in self._events.feed(chunk))

    def end(self) -> bytes:
        """Return the last answer and the end of the array, or an error if a candidate did not end."""
        last = b"" if self._is_failed else self._last_answer()
        return last if self._is_sse else last + b"]"

    def _last_answer(self) -> bytes:
        if not self._ended or self._candidates.keys() - self._ended.keys():
            return self._error(500, "the policy's stream ended before its answer did")
        return self._framed(msgspec.json.encode({"candidates": [*self._ended.values()], **self._last}))

    def _error(self, status: int, message: str) -> bytes:
        self._is_failed = True
        return self._framed(google_error(status, message))

    def _answer(self, chunk: dict[str, Any]) -> bytes:
        if chunk.get("error"):
            error = as_object(chunk["error"])
            status = error.get("code") if isinstance(error.get("code"), int) else 500
            return self._error(int(status or 500), str(error.get("message") or chunk["error"]))
        found = [one for choice in objects_in(chunk.get("choices")) if (one := self._candidate(choice))]
        about = _about(chunk, self._model)
        for one in found:
            if "finishReason" in one:
                self._ended.setdefault(one["index"], one)
        self._last |= about
        going = [one for one in found if "finishReason" not in one]
        return self._framed(msgspec.json.encode({"candidates": going, **about})) if going else b""

    def _candidate(self, choice: dict[str, Any]) -> dict[str, Json] | None:
        at = choice.get("index")
        index = at if isinstance(at, int) else 0
        building = self._candidates.setdefault(index, _Candidate())
        parts = [*building.delta(as_object(choice.get("delta")))]
        reason = text_in(choice.get("finish_reason"))
        if reason:
            parts += building.end()
        if not (parts or reason):
            return None
        ended = {"finishReason": _REASONS.get(reason, "OTHER")} if reason else {}
        return {"content": {"role": "model", "parts": parts}, **ended, "index": index}

    def _framed(self, body: bytes) -> bytes:
        self._count += 1
        if self._is_sse:
            return b"data: " + body + b"\r\n\r\n"
        return (b"[" if self._count == 1 else b",\r\n") + body


GOOGLE_BASE = "/v1beta/models"
COUNT_TOKENS = "countTokens"

_GENERATE = "generateContent"
_STREAM = "streamGenerateContent"
GOOGLE_METHODS = (_GENERATE, _STREAM, COUNT_TOKENS)
_ENDPOINT = re.compile(rf"/models/(.{{1,512}}):({_GENERATE}|{_STREAM}|{COUNT_TOKENS})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleEndpoint:
    """A method of Google's API, and the model that the request path names."""

    model: str
    method: str

    def translation(self, alt: str) -> GoogleTranslation:
        """Return a translation for one call; ``alt`` is the value of the query parameter ``alt``."""
        is_streamed = self.method == _STREAM
        return GoogleTranslation(model=self.model, is_streamed=is_streamed, is_sse=alt == "sse")


def google_endpoint(endpoint: str) -> GoogleEndpoint | None:
    """Return the method at an endpoint such as ``/models/m:generateContent``; ``None`` for any other endpoint.

    ``endpoint`` is already percent-decoded.
    """
    found = _ENDPOINT.fullmatch(endpoint)
    return None if found is None else GoogleEndpoint(model=found[1], method=found[2])
