"""Model calls from the requests and answers that tracers keep.

Tracers keep the bodies of a provider's API, or messages as LangChain writes them, or texts only. Bodies stay as they
are, in their own dialect; the rest becomes OpenAI's chat.
"""

import json
from typing import Any

from agl.schemas import Dialect, Json, ModelCall, Sampling, Usage
from agl_data.importing.runs import IDS_MISSING
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, first, json_text, number_of, whole_of

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "model": "assistant", "chat": "user"}
_KNOWN = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_PROMPTS = ("messages", "input", "prompt", "prompts", "question", "query", "contents")
_ANSWERS = (
    "choices",
    "generations",
    "message",
    "messages",
    "output",
    "outputs",
    "content",
    "text",
    "answer",
    "response",
)
_DEEPEST = 16
"""Levels down to which messages are looked for; those of LangChain are four down."""

FLOATS = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
WHOLE = ("top_k", "max_tokens", "seed")
"""Names of sampling parameters."""


def call_of(
    key: str,
    asked: Json,
    answered: Json,
    *,
    model: str = "",
    settings: Json = None,
    tools: Json = None,
    usage: Json = None,
    error: str = "",
) -> ModelCall:
    """Return the call that a tracer kept.

    Args:
        key: The id of the exchange.
        asked: What went in: a request's body, messages, or a text.
        answered: What came out: a response's body, a message, or a text.
        model: The model's name, unless it is a field of the request.
        settings: Sampling parameters, unless they are fields of the request.
        tools: Definitions of the tools, unless they are a field of the request.
        usage: Counts of tokens in chat's form.
        error: The text of the failure, ``""`` without one.
    """
    asked, answered = parsed(asked), parsed(answered)
    request, response = as_dict(asked), as_dict(answered)
    own = _dialect(request, response)
    known = {**as_dict(settings), **{name: request[name] for name in (*FLOATS, *WHOLE, "stop") if name in request}}
    name = first((model, request.get("model"), response.get("model"), ""))
    if own is None:
        given = first((tools, request.get("tools"), []))
        request = {"model": name, "messages": messages_of(asked)} | ({"tools": given} if as_list(given) else {})
        message = answer_of(answered)
        response = {"choices": [{"index": 0, "message": message}]} if message else {}
    if usage and own in (None, "chat"):
        response = {**response, "usage": first((response.get("usage"), usage))}
    choices = dicts_in(response.get("choices"))
    return ModelCall(
        request_id=key,
        dialect=own or "chat",
        model=as_text(name),
        request=request,
        response=response or None,
        sampling=sampling_of(known),
        ids_missing=IDS_MISSING,
        finish_reason=as_text(first((choices[0].get("finish_reason") if choices else "", response.get("stop_reason")))),
        status_code=0 if error else 200,
        is_complete=not error,
        error=error,
    )


def _dialect(request: dict[str, Any], response: dict[str, Any]) -> Dialect | None:
    """Return the API whose bodies these are, ``None`` for other records."""
    given = as_list(request.get("messages"))
    if given and all("role" in as_dict(each) for each in given):
        if response.get("type") == "message" and isinstance(response.get("content"), list):
            return "messages"
        if any("message" in choice for choice in dicts_in(response.get("choices"))):
            return "chat"
    is_response = response.get("object") == "response" and isinstance(response.get("output"), list)
    return "responses" if is_response and "input" in request else None


def messages_of(value: Json, depth: int = 0) -> list[dict[str, Any]]:
    """Return the messages of a request of any form; a text is one of the user. ``depth`` is how deep it stands."""
    found = parsed(value)
    if isinstance(found, str):
        return [{"role": "user", "content": found}] if found else []
    if isinstance(found, list) and depth < _DEEPEST:
        items = as_list(found)
        if items and isinstance(items[0], list):
            return messages_of(items[0], depth + 1)  # LangChain asks for several conversations at once
        return [each for item in items for each in messages_of(item, depth + 1)]
    fields = as_dict(found)
    message = _message(fields)
    if message is not None:
        return [message]
    return messages_of(first(fields.get(name) for name in _PROMPTS), depth + 1) if fields and depth < _DEEPEST else []


def answer_of(value: Json, depth: int = 0) -> dict[str, Any] | None:
    """Return the message that an answer of any form holds, ``None`` without one. ``depth`` is how deep it stands."""
    found = parsed(value)
    if isinstance(found, str):
        return {"role": "assistant", "content": found} if found else None
    if isinstance(found, list) and depth < _DEEPEST:
        answers = [each for item in as_list(found) if (each := answer_of(item, depth + 1))]
        return answers[-1] if answers else None
    fields = as_dict(found)
    message = _message(fields)
    if message is not None:
        return {**message, "role": "assistant"}
    return answer_of(first(fields.get(name) for name in _ANSWERS), depth + 1) if fields and depth < _DEEPEST else None


def _message(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return a message of chat, or of LangChain, in chat's form; ``None`` for another object."""
    if fields.get("lc") and isinstance(fields.get("kwargs"), dict):
        name = as_text(first(reversed(as_list(fields.get("id"))))).removesuffix("Chunk").removesuffix("Message").lower()
        return _message({"type": name, **as_dict(fields["kwargs"])})
    if isinstance(fields.get("data"), dict) and "type" in fields:
        return _message({"type": fields["type"], **as_dict(fields["data"])})
    role = as_text(fields.get("role")) or (as_text(fields.get("type")) if "content" in fields else "")
    role = _ROLES.get(role, role)
    if role not in _KNOWN:
        return None
    message: dict[str, Any] = {"role": role, "content": fields.get("content")}
    calls = [_tool_call(call) for call in dicts_in(fields.get("tool_calls"))]
    calls = calls or [_tool_call(call) for call in dicts_in(as_dict(fields.get("additional_kwargs")).get("tool_calls"))]
    message |= {"tool_calls": calls} if calls else {}
    message |= {name: fields[name] for name in ("tool_call_id", "name", "reasoning_content") if fields.get(name)}
    return message


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool in chat's form, also of LangChain's ``name`` and ``args``."""
    function = as_dict(call.get("function"))
    if function:
        return {"id": call.get("id"), "type": "function", "function": function}
    arguments = json_text(first((call.get("args"), call.get("arguments"), {})))
    return {"id": call.get("id"), "type": "function", "function": {"name": call.get("name"), "arguments": arguments}}


def parsed(value: Json) -> Json:
    """Return a value, parsed where a tracer wrote an object or a list as JSON text."""
    return decoded(value) if isinstance(value, str) and value.lstrip().startswith(("{", "[")) else value


def decoded(value: Json) -> Json:
    """Return a value, parsed where it is any JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def chat_usage(found: Json) -> dict[str, Json]:
    """Return counts of tokens in chat's form, from those of any provider; empty where nothing was counted."""
    usage = Usage.read(parsed(found))
    if not usage.prompt and not usage.answer:
        return {}
    counts: dict[str, Json] = {"prompt_tokens": usage.prompt, "completion_tokens": usage.answer}
    cached: dict[str, Json] = {"cached_tokens": usage.cached}
    thoughts: dict[str, Json] = {"reasoning_tokens": usage.thoughts}
    return (
        counts
        | ({"prompt_tokens_details": cached} if usage.cached else {})
        | ({"completion_tokens_details": thoughts} if usage.thoughts else {})
    )


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """Return sampling parameters by their names."""
    found: dict[str, Any] = {name: _number(settings.get(name)) for name in FLOATS}
    found |= {name: whole_of(_number(settings.get(name))) for name in WHOLE}
    stops = settings.get("stop")
    return Sampling(**found, stop=(stops,) if isinstance(stops, str) else tuple(map(as_text, as_list(stops))))


def _number(value: Json) -> float | None:
    """Return a number, also of a text; ``None`` for one that is not finite."""
    try:
        return number_of(float(value) if isinstance(value, str) else value)
    except ValueError:
        return None
