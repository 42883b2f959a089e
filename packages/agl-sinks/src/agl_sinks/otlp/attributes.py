"""Makes the attributes of OTLP spans: filters contents, describes calls by the GenAI conventions, converts values.

Unless contents are allowed, only known attributes that describe a run are sent, because tracers and agents may add
contents under any other name.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl import semconv
from agl.dialects import call_messages
from agl.schemas import Json, ModelCall, SpanEvent, Transition, to_json

_DESCRIPTIVE = re.compile(
    r"gen_ai\.(operation\.name|provider\.name|system|workflow\.name|conversation\.id|output\.type|data_source\.id"
    r"|agent\.(name|id|version)|tool\.(name|type|call\.id)|request\..+|response\..+|usage\..+"
    r"|embeddings\..+|evaluation\.(name|score\..+))"
    r"|agl\.(?!observation\.content$|message$|object$|output$).+"
    r"|error\.type|exception\.(type|escaped)|server\.(address|port)|user_agent\.original|otel\.scope\..+"
)


def allowed(attributes: Mapping[str, Any], *, has_contents: bool) -> dict[str, Json]:
    """Return the attributes that may be sent: all of them if contents may, else only those that describe the run."""
    if has_contents:
        return dict(attributes)
    return {key: value for key, value in attributes.items() if _DESCRIPTIVE.fullmatch(key)}


def allowed_events(events: tuple[SpanEvent, ...], *, has_contents: bool) -> list[SpanEvent]:
    """Return the events, with only those attributes that may be sent."""
    return [
        SpanEvent(
            name=event.name, time_ns=event.time_ns, attributes=allowed(event.attributes, has_contents=has_contents)
        )
        for event in events
    ]


_INT64 = 1 << 63


def key_values(attributes: Mapping[str, Any]) -> Iterator[KeyValue]:
    """Convert attributes to OTLP's ``KeyValue``; leaves out ``None`` and empty texts and lists."""
    for key, value in attributes.items():
        if value is not None and value != "" and value != [] and value != ():
            yield KeyValue(key=_text(key), value=_any(value))


def as_text(value: Any) -> str:
    """Return a text unchanged, and any other JSON value as JSON."""
    return value if isinstance(value, str) else to_json(value).decode()


def _any(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int() if -_INT64 <= value < _INT64:
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case list() | tuple() if all(isinstance(item, str) for item in cast("list[Any]", value)):
            made = AnyValue()
            made.array_value.values.extend(_any(item) for item in cast("list[str]", value))
            return made
        case _:
            return AnyValue(string_value=_text(as_text(value)))


def _text(value: str) -> str:
    """Return the text with lone surrogates replaced, which UTF-8 cannot hold."""
    return value.encode("utf-8", "replace").decode()


INPUT, OUTPUT, TOOLS = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions"


def message_attributes(call: ModelCall) -> dict[str, Json]:
    """Return a call's messages and tools as attributes with JSON text, since attributes cannot hold nested values.

    Values that are nested too deeply to be encoded are left out.
    """
    asked = call_messages(msgspec.structs.replace(call, response=None))
    whole = call_messages(call)
    answered = whole[len(asked) :] or (whole[-1:] if whole != asked else [])
    outputs = [{**_message(message), "finish_reason": call.finish_reason or "unknown"} for message in answered]
    request: Any = call.request
    tools = cast("dict[str, Json]", request).get("tools") if isinstance(request, dict) else None
    found = {INPUT: [_message(message) for message in asked], OUTPUT: outputs, TOOLS: tools}
    texts: dict[str, Json] = {name: _json(value) for name, value in found.items() if value}
    return {name: text for name, text in texts.items() if text}


def _json(value: Any) -> str:
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
    """Return the arguments decoded from JSON; unchanged if they are not JSON or nested too deeply."""
    try:
        return msgspec.json.decode(arguments)
    except (TypeError, ValueError, RecursionError, msgspec.DecodeError):
        return arguments


def _objects(values: Any) -> Sequence[Mapping[str, Any]]:
    items = cast("list[Any]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


_PROVIDERS = {"messages": "anthropic"}
"""The provider of a dialect's wire format; for dialects that are not listed it is ``openai``."""


def call_attributes(call: ModelCall, seen: Transition | None, *, has_contents: bool) -> dict[str, Json]:
    """Return the attributes of a model call, to be added to those of its span.

    Args:
        call: The call.
        seen: The call's transition, with its agent, reward and reject reason; ``None`` if it has none.
        has_contents: Include messages and the details of reject reasons.
    """
    return {
        semconv.PROVIDER: _PROVIDERS.get(call.dialect, "openai"),
        semconv.REQUEST_MODEL: call.model,
        semconv.FINISH_REASONS: [call.finish_reason] if call.finish_reason else None,
        **_sampling(call),
        "gen_ai.request.stream": call.is_streamed or None,
        "gen_ai.response.time_to_first_chunk": call.first_token_s if call.is_streamed else None,
        "http.response.status_code": call.status_code or None,
        "agl.dialect": call.dialect,
        "agl.policy": call.policy,
        semconv.MODEL_VERSION: call.model_version,
        **(_seen(seen, has_contents=has_contents) if seen else {}),
        **(message_attributes(call) if has_contents else {}),
    }


def _sampling(call: ModelCall) -> dict[str, Json]:
    sampling = call.sampling
    named = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "max_tokens": sampling.max_tokens,
        "stop_sequences": list(sampling.stop),
        "seed": sampling.seed,
        "choice.count": call.choices if call.choices != 1 else None,
    }
    return {f"gen_ai.request.{name}": value for name, value in named.items()}


def _seen(seen: Transition, *, has_contents: bool) -> dict[str, Json]:
    return {
        semconv.AGENT_NAME: seen.agent,
        "agl.agent_path": list(seen.path),
        "agl.turn": seen.turn,
        "agl.reward": seen.reward,
        "agl.reject": seen.reject,
        "agl.reject_detail": seen.detail if has_contents else None,
    }
