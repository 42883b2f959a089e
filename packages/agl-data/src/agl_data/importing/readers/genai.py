"""Converts spans with OpenTelemetry's GenAI attributes to model calls in the form of OpenAI's chat."""

from typing import Any

from agl import semconv
from agl.schemas import Json, ModelCall
from agl_data.importing.readers.payloads import FLOATS, WHOLE, decoded, sampling_of
from agl_data.importing.runs import IDS_MISSING
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, first, json_text

SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
MESSAGES = (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES, SYSTEM, TOOLS)
CONTENT = (*MESSAGES, "llm.", "input.", "output.", "gen_ai.prompt.", "gen_ai.completion.")
"""Prefixes of attributes that are dropped, because the fields of the call have their contents."""

_CALLS = frozenset({semconv.OP_CHAT, semconv.OP_TEXT_COMPLETION, "generate_content"})


def is_call(attributes: dict[str, Json]) -> bool:
    """Return whether a span with these attributes is a model call."""
    return as_text(attributes.get(semconv.OPERATION)) in _CALLS


def call_of(key: str, attributes: dict[str, Json], *, error: str) -> ModelCall:
    """Return the call that a span's attributes describe; ``error`` is the span's error text, ``""`` if it succeeded."""
    model = as_text(attributes.get(semconv.REQUEST_MODEL)) or as_text(attributes.get(semconv.RESPONSE_MODEL))
    system = _parts(decoded(attributes.get(SYSTEM)))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [each for found in _listed(attributes.get(semconv.INPUT_MESSAGES)) for each in _messages(found)]
    tools = decoded(attributes.get(TOOLS))
    request: dict[str, Json] = {"model": model, "messages": messages}
    answers = [each for found in _listed(attributes.get(semconv.OUTPUT_MESSAGES)) for each in _messages(found)]
    reasons = as_list(attributes.get(semconv.FINISH_REASONS))
    usage = {
        "prompt_tokens": attributes.get(semconv.INPUT_TOKENS),
        "completion_tokens": attributes.get(semconv.OUTPUT_TOKENS),
    }
    response: dict[str, Json] = {
        "id": attributes.get(semconv.RESPONSE_ID),
        "model": attributes.get(semconv.RESPONSE_MODEL),
        "choices": [{"index": index, "message": answer} for index, answer in enumerate(answers)],
        "usage": {name: value for name, value in usage.items() if isinstance(value, int)},
    }
    return ModelCall(
        request_id=key,
        dialect="chat",
        model=model,
        model_version=as_text(attributes.get(semconv.MODEL_VERSION)),
        request={**request, **({"tools": tools} if isinstance(tools, list) and tools else {})},
        response={name: value for name, value in response.items() if value} or None,
        sampling=sampling_of(_settings(attributes)),
        ids_missing=IDS_MISSING,
        finish_reason=as_text(first(reasons)),
        status_code=200 if not error else 0,
        is_complete=not error,
        error=error,
    )


def _settings(attributes: dict[str, Json]) -> dict[str, Json]:
    names = {**{name: name for name in (*FLOATS, *WHOLE)}, "stop": "stop_sequences"}
    return {name: attributes.get(f"gen_ai.request.{given}") for name, given in names.items()}


def _listed(value: Json) -> list[dict[str, Any]]:
    found = decoded(value)
    return [{"role": "user", "content": found}] if isinstance(found, str) and found else dicts_in(found)


def _messages(message: dict[str, Any]) -> list[dict[str, Json]]:
    """Convert a message of the GenAI conventions to messages of chat: one per tool result, and one for the rest."""
    if "parts" not in message:
        return [{name: value for name, value in message.items() if name != "finish_reason"}]
    parts = dicts_in(message.get("parts"))
    results: list[dict[str, Json]] = [
        {
            "role": "tool",
            "tool_call_id": part.get("id"),
            "content": json_text(first((part.get("response"), part.get("result"), ""))),
        }
        for part in parts
        if part.get("type") == "tool_call_response"
    ]
    calls = [_tool_call(part) for part in parts if part.get("type") == "tool_call"]
    reasoning = "".join(as_text(part.get("content")) for part in parts if part.get("type") == "reasoning")
    content = _parts(parts)
    if not (content or calls or reasoning) and results:
        return results
    own: dict[str, Json] = {"role": as_text(message.get("role")) or "user", "content": content or None}
    own |= {"tool_calls": calls} if calls else {}
    own |= {"reasoning_content": reasoning} if reasoning else {}
    return [*results, own]


def _tool_call(part: dict[str, Any]) -> dict[str, Json]:
    function = {"name": part.get("name"), "arguments": json_text(part.get("arguments"))}
    return {"id": part.get("id"), "type": "function", "function": function}


def _parts(parts: Json) -> Json:
    """Return the joined text of message parts; if one is not text, return all as chat's content parts."""
    if isinstance(parts, str):
        return parts
    found = [part for part in map(_part, dicts_in(parts)) if part]
    if all(part["type"] == "text" for part in found):
        return "".join(as_text(part["text"]) for part in found)
    return found


def _part(part: dict[str, Any]) -> dict[str, Json]:
    match part.get("type"):
        case "text":
            return {"type": "text", "text": as_text(part.get("content"))}
        case "uri":
            return {"type": "image_url", "image_url": {"url": as_text(as_dict(part).get("uri"))}}
        case _:
            return {}
