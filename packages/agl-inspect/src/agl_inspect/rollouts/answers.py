"""Encodes recorded answers, and answers made from a text, as the bytes that a client expects."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from agl.dialects import call_messages
from agl.schemas import Dialect, Json, ModelCall, to_json
from agl_inspect.rollouts.conversations import comparable
from agl_inspect.rollouts.streams import stream_of

_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def asked(dialect: Dialect, request: Json) -> list[dict[str, Any]]:
    """Return the conversation that a request body asks to continue, in comparable form."""
    return comparable(call_messages(ModelCall(request_id="", dialect=dialect, model="", request=request)))


def key_of(dialect: Dialect, request: Json) -> bytes:
    """Return a key that is equal for requests of one dialect that ask to continue the same conversation."""
    return to_json([dialect, asked(dialect, request)])


def exchanges_of(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """Group calls into HTTP exchanges, whose choices they are, in order of the first call."""
    found: dict[tuple[str, int], list[ModelCall]] = {}
    for call in calls:
        found.setdefault((call.request_id, call.retry_count), []).append(call)
    return list(found.values())


def answer_of(exchange: Sequence[ModelCall]) -> dict[str, Any] | None:
    """Return the response body of an exchange with all its choices, ``None`` if it was no JSON object."""
    first = exchange[0]
    if not _is_object(first.response):
        return None
    answer = dict(first.response)
    if len(exchange) > 1:
        answer["choices"] = [choice for call in exchange for choice in call.response.get("choices", ())]
    return answer


def encode_answer(dialect: Dialect, answer: dict[str, Any], *, is_streamed: bool) -> tuple[str, bytes]:
    """Encode an answer as content type and body: plain, or as the event stream of the dialect."""
    if is_streamed:
        return "text/event-stream", stream_of(dialect, answer)
    return "application/json", to_json(answer)


def text_answer(dialect: Dialect, request: Json, *, text: str, answer_id: str) -> dict[str, Any]:
    """Make a response body with ``text``, without tool calls, and with the requested number of choices."""
    body: dict[str, Any] = request if _is_object(request) else {}
    head: dict[str, Any] = {"id": answer_id, "model": body.get("model", "")}
    count = body.get("n")
    choices = range(count if isinstance(count, int) else 1)
    match dialect:
        case "chat":
            message = {"role": "assistant", "content": text}
            return _completion(head, "chat.completion", [{"message": message} for _ in choices])
        case "completions":
            return _completion(head, "text_completion", [{"text": text} for _ in choices])
        case "messages":
            usage = {"input_tokens": 0, "output_tokens": 0}
            ending = {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
            return {
                **head,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                **ending,
            }
        case "responses":
            return _response(head, body, text)
        case "embeddings":
            raise ValueError("an embedding is no text")


def _completion(head: dict[str, Any], kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    numbered = [{"index": index, **choice, "finish_reason": "stop"} for index, choice in enumerate(choices)]
    return {**head, "object": kind, "created": 0, "choices": numbered, "usage": _NO_USAGE}


def _response(head: dict[str, Any], body: dict[str, Any], text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    said: dict[str, Any] = {
        "type": "message",
        "id": f"msg_{head['id']}",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    usage = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    asked_for = {"tools": body.get("tools", []), "tool_choice": body.get("tool_choice", "auto")}
    kind = {"object": "response", "created_at": 0, "status": "completed", "parallel_tool_calls": True}
    return {**head, **kind, **asked_for, "output": [said], "usage": usage}


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
