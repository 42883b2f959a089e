"""Makes model calls from the requests and responses that tracers record.

Tracers record the bodies of a provider's API, messages in LangChain's form, or plain texts. Bodies of a known API stay
unchanged, in their own dialect; everything else becomes OpenAI's chat.
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
"""Number of nested levels that are searched for messages; LangChain nests them four levels deep."""

FLOATS = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
WHOLE = ("top_k", "max_tokens", "seed")
"""Names of the sampling parameters that are whole numbers; :data:`FLOATS` has the others."""


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
    """Return the model call that a tracer recorded.

    Args:
        key: The id of the call.
        asked: The input of the call: a request body, messages, or a text.
        answered: The output of the call: a response body, a message, or a text.
        model: The model's name; if empty, it is read from the request or the response.
        settings: Sampling parameters; those in the request take precedence.
        tools: Tool definitions; if empty, they are read from the request.
        usage: Token counts in chat's form.
        error: The error text; ``""`` if the call succeeded.
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
    """Return the dialect of a request body and its response body; ``None`` if they are not bodies of a known API."""
    given = as_list(request.get("messages"))
    if given and all("role" in as_dict(each) for each in given):
        if response.get("type") == "message" and isinstance(response.get("content"), list):
            return "messages"
        if any("message" in choice for choice in dicts_in(response.get("choices"))):
            return "chat"
    is_response = response.get("object") == "response" and isinstance(response.get("output"), list)
    return "responses" if is_response and "input" in request else None


def messages_of(value: Json, depth: int = 0) -> list[dict[str, Any]]:
    """Return the messages in a request of any form; a plain text becomes a user message.

    ``depth`` counts the nested levels above ``value``.
    """
    found = parsed(value)
    if isinstance(found, str):
        return [{"role": "user", "content": found}] if found else []
    if isinstance(found, list) and depth < _DEEPEST:
        items = as_list(found)
        if items and isinstance(items[0], list):
            return messages_of(items[0], depth + 1)  # LangChain nests lists, for several conversations in one request
        return [each for item in items for each in messages_of(item, depth + 1)]
    fields = as_dict(found)
    message = _message(fields)
    if message is not None:
        return [message]
    return messages_of(first(fields.get(name) for name in _PROMPTS), depth + 1) if fields and depth < _DEEPEST else []


def answer_of(value: Json, depth: int = 0) -> dict[str, Any] | None:
    """Return the message in an answer of any form; ``None`` if it has none.

    ``depth`` counts the nested levels above ``value``.
    """
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
    """Return a message of chat or of LangChain in chat's form; ``None`` if the object is not a message."""
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
    kept = ("tool_call_id", "name", "reasoning_content", "reasoning")
    message |= {name: fields[name] for name in kept if fields.get(name)}
    return message


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call in chat's form; accepts chat's own form and LangChain's ``name`` and ``args``."""
    function = as_dict(call.get("function"))
    if function:
        return {"id": call.get("id"), "type": "function", "function": function}
    arguments = json_text(first((call.get("args"), call.get("arguments"), {})))
    return {"id": call.get("id"), "type": "function", "function": {"name": call.get("name"), "arguments": arguments}}


def parsed(value: Json) -> Json:
    """Parse a text that holds a JSON object or list; return any other value unchanged."""
    return decoded(value) if isinstance(value, str) and value.lstrip().startswith(("{", "[")) else value


def decoded(value: Json) -> Json:
    """Parse a text that holds any JSON value; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def chat_usage(found: Json) -> dict[str, Json]:
    """Convert any provider's token counts to chat's form; empty if there are no counts."""
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
    """Read the sampling parameters from settings by name; parameters that are missing or malformed stay unset."""
    found: dict[str, Any] = {name: _number(settings.get(name)) for name in FLOATS}
    found |= {name: whole_of(_number(settings.get(name))) for name in WHOLE}
    stops = settings.get("stop")
    return Sampling(**found, stop=(stops,) if isinstance(stops, str) else tuple(map(as_text, as_list(stops))))


def _number(value: Json) -> float | None:
    """Return a finite number from a number or a text; ``None`` for anything else."""
    try:
        return number_of(float(value) if isinstance(value, str) else value)
    except ValueError:
        return None
