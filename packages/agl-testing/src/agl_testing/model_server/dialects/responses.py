"""Reads and writes ``POST /v1/responses``: typed items and events, and on request vLLM's raw messages with ids."""

from collections.abc import Iterator
from typing import Any, cast

from agl_testing.model_server.answer import (
    Piece,
    ScriptedAnswer,
    ScriptedExchange,
    content_logprobs,
    logprobs_of,
    named_event,
)
from agl_testing.model_server.codec import ConversationTurn, FunctionCall, decode


def turns_of(body: dict[str, Any]) -> tuple[ConversationTurn, ...]:
    """Return the instructions and input items as turns; consecutive items of the assistant become one turn."""
    turns: list[ConversationTurn] = []
    if body.get("instructions"):
        turns.append(ConversationTurn(role="system", text=body["instructions"]))
    given = body.get("input", "")
    items: list[dict[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        turn = _turn(item)
        if turns and turn.role == "assistant" and turns[-1].role == "assistant":
            turns[-1] = _merge(turns[-1], turn)
        else:
            turns.append(turn)
    return tuple(turns)


def body_of(exchange: ScriptedExchange) -> dict[str, Any]:
    """Return the body of a response that is not streamed; the last event of a stream holds it too."""
    answer = exchange.answers[0]
    out = _response(exchange, "incomplete" if answer.reason == "length" else "completed")
    out["output"] = _output(exchange)
    out["usage"] = _usage(exchange)
    if answer.reason == "length":
        out["incomplete_details"] = {"reason": "max_output_tokens"}
    if exchange.flavour == "every" and exchange.body.get("enable_response_messages"):
        out |= {"prompt_token_ids": exchange.prompts[0], "token_ids": answer.ids, "logprobs": logprobs_of(answer.ids)}
    if exchange.flavour == "vllm" and exchange.body.get("enable_response_messages"):
        out["input_messages"] = [_raw_message(decode(exchange.prompts[0]), exchange.prompts[0])]
        out["output_messages"] = [_raw_message(decode(answer.ids), answer.ids)]
    return out


def events_of(exchange: ScriptedExchange) -> Iterator[bytes]:
    """Yield the typed events of the streamed response, numbered from 0."""
    for number, event in enumerate(_events(exchange)):
        yield named_event({**event, "sequence_number": number})


def _events(exchange: ScriptedExchange) -> Iterator[dict[str, Any]]:
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": _response(exchange, "in_progress")}
    answer = exchange.answers[0]
    for index, item in enumerate(_output(exchange)):
        pieces = [piece for piece in answer.pieces if _belongs(piece, answer, index)]
        events = _message_events if item["type"] == "message" else _call_events
        yield from events(exchange, index, item, pieces)
    final = body_of(exchange)
    yield {"type": f"response.{final['status']}", "response": final}


def _message_events(
    exchange: ScriptedExchange, index: int, item: dict[str, Any], pieces: list[Piece]
) -> Iterator[dict[str, Any]]:
    where = {"item_id": item["id"], "output_index": index, "content_index": 0}
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    opened: dict[str, Any] = {**item, "status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    yield {"type": "response.content_part.added", **where, "part": part}
    for piece in pieces:
        logprobs = _logprobs(exchange, piece.ids, piece.start)
        yield {"type": "response.output_text.delta", **where, "delta": piece.text, "logprobs": logprobs}
    done = item["content"][0]
    yield {"type": "response.output_text.done", **where, "text": done["text"], "logprobs": done["logprobs"]}
    yield {"type": "response.content_part.done", **where, "part": done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(
    _: ScriptedExchange, index: int, item: dict[str, Any], pieces: list[Piece]
) -> Iterator[dict[str, Any]]:
    where = {"item_id": item["id"], "output_index": index}
    opened = {**item, "status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    for piece in pieces:
        yield {"type": "response.function_call_arguments.delta", **where, "delta": piece.text}
    arguments = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **where, **arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _belongs(piece: Piece, answer: ScriptedAnswer, index: int) -> bool:
    has_message = bool(answer.text) or not answer.calls
    if has_message and index == 0:
        return piece.kind == "text"
    return piece.kind == "arguments" and piece.call == index - has_message


def _turn(item: dict[str, Any]) -> ConversationTurn:
    kind = item.get("type", "message")
    if kind == "function_call":
        return ConversationTurn(role="assistant", calls=(FunctionCall(item["name"], item["arguments"]),))
    if kind == "function_call_output":
        return ConversationTurn(role="tool", text=_content(item["output"])[0])
    text, images = _content(item.get("content"))
    return ConversationTurn(role=item.get("role", "user"), text=text, images=images)


def _content(content: object) -> tuple[str, int]:
    if not isinstance(content, list):
        return str(content or ""), 0
    parts = cast("list[dict[str, Any]]", content)
    return "".join(part.get("text", "") for part in parts), sum(part.get("type") == "input_image" for part in parts)


def _merge(first: ConversationTurn, second: ConversationTurn) -> ConversationTurn:
    return ConversationTurn(role="assistant", text=first.text + second.text, calls=first.calls + second.calls)


def _response(exchange: ScriptedExchange, status: str) -> dict[str, Any]:
    body = exchange.body
    return {
        "id": f"resp_{exchange.number}",
        "object": "response",
        "created_at": exchange.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": exchange.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature", 1.0),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
    }


def _output(exchange: ScriptedExchange) -> list[dict[str, Any]]:
    answer, items = exchange.answers[0], list[dict[str, Any]]()
    if answer.text or not answer.calls:
        text_ids = [number for piece in answer.pieces if piece.kind == "text" for number in piece.ids]
        logprobs = _logprobs(exchange, text_ids, 0)
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": logprobs}
        message = {"type": "message", "id": f"msg_{exchange.number}", "role": "assistant", "content": [part]}
        items.append({**message, "status": "incomplete" if answer.reason == "length" else "completed"})
    for index, call in enumerate(answer.calls):
        head = {"type": "function_call", "id": f"fc_{exchange.number}_{index}", "status": "completed"}
        named = {"call_id": answer.call_ids[index], "name": call.name, "arguments": call.arguments}
        space = {"namespace": call.namespace} if call.namespace else {}
        items.append({**head, **named, **space})
    return items


def _logprobs(exchange: ScriptedExchange, ids: list[int], start: int) -> list[dict[str, Any]]:
    if "message.output_text.logprobs" not in (exchange.body.get("include") or ()):
        return []
    return content_logprobs(ids, start)


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _raw_message(text: str, ids: list[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": ids}
