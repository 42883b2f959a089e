"""Reads and writes ``POST /v1/messages``, with Anthropic's content blocks and named events.

Anthropic's format has no token ids. The flavour ``every`` adds them to the body, and to a stream's ``message_delta``.
"""

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from agl_testing.model_server.answer import Piece, ScriptedAnswer, ScriptedExchange, logprobs_of, named_event
from agl_testing.model_server.codec import ConversationTurn, FunctionCall

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def turns_of(body: dict[str, Any]) -> tuple[ConversationTurn, ...]:
    """Return the system prompt and the messages as turns; each tool result becomes a separate turn."""
    turns: list[ConversationTurn] = []
    if body.get("system"):
        turns.append(ConversationTurn(role="system", text=_text(_blocks(body["system"]))))
    for message in body.get("messages", ()):
        turns += _turns(message["role"], _blocks(message["content"]))
    return tuple(turns)


def body_of(exchange: ScriptedExchange) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    answer = exchange.answers[0]
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if _has_text(answer) else []
    for index, call in enumerate(answer.calls):
        content.append(_tool_use(answer, index, msgspec.json.decode(call.arguments)))
    usage = {"input_tokens": exchange.prompt_tokens, "output_tokens": exchange.completion_tokens}
    return {**_message(exchange, usage), "content": content, "stop_reason": _reason(answer), **_tokens(exchange)}


def events_of(exchange: ScriptedExchange) -> Iterator[bytes]:
    """Yield the events of the streamed response: the start, then the events of each block in turn, then the end."""
    yield from map(named_event, _events(exchange))


def _events(exchange: ScriptedExchange) -> Iterator[dict[str, Any]]:
    answer = exchange.answers[0]
    usage = {"input_tokens": exchange.prompt_tokens, "output_tokens": 1}
    yield {"type": "message_start", "message": _message(exchange, usage)}
    yield {"type": "ping"}
    if _has_text(answer):
        pieces = [piece for piece in answer.pieces if piece.kind == "text"]
        yield from _block_events(0, {"type": "text", "text": ""}, pieces)
    for index in range(len(answer.calls)):
        pieces = [piece for piece in answer.pieces if piece.kind == "arguments" and piece.call == index]
        yield from _block_events(index + _has_text(answer), _tool_use(answer, index, {}), pieces)
    delta = {"stop_reason": _reason(answer), "stop_sequence": None}
    usage = {"output_tokens": exchange.completion_tokens}
    yield {"type": "message_delta", "delta": delta, "usage": usage, **_tokens(exchange)}
    yield {"type": "message_stop"}


def _tokens(exchange: ScriptedExchange) -> dict[str, Any]:
    if not exchange.wants_ids or exchange.flavour != "every":
        return {}
    ids = exchange.answers[0].ids
    return {"prompt_token_ids": exchange.prompts[0], "token_ids": ids, "logprobs": logprobs_of(ids)}


def _block_events(index: int, block: dict[str, Any], pieces: list[Piece]) -> Iterator[dict[str, Any]]:
    kind, field = ("text_delta", "text") if block["type"] == "text" else ("input_json_delta", "partial_json")
    yield {"type": "content_block_start", "index": index, "content_block": block}
    for piece in pieces:
        yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: piece.text}}
    yield {"type": "content_block_stop", "index": index}


def _has_text(answer: ScriptedAnswer) -> bool:
    return bool(answer.text) or not answer.calls


def _reason(answer: ScriptedAnswer) -> str:
    return _STOP_REASONS.get(answer.reason, answer.reason)


def _tool_use(answer: ScriptedAnswer, index: int, given: object) -> dict[str, Any]:
    call_id = answer.call_ids[index].replace("call_", "toolu_")
    return {"type": "tool_use", "id": call_id, "name": answer.calls[index].name, "input": given}


def _message(exchange: ScriptedExchange, usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{exchange.number}",
        "type": "message",
        "role": "assistant",
        "model": exchange.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _blocks(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return cast("list[dict[str, Any]]", content or [])


def _text(blocks: list[dict[str, Any]]) -> str:
    return "".join(block.get("text", "") for block in blocks if block.get("type") == "text")


def _turns(role: str, blocks: list[dict[str, Any]]) -> list[ConversationTurn]:
    results = [block for block in blocks if block["type"] == "tool_result"]
    turns = [ConversationTurn(role="tool", text=_text(_blocks(block.get("content", "")))) for block in results]
    rest = [block for block in blocks if block["type"] != "tool_result"]
    if rest:
        uses = [block for block in rest if block["type"] == "tool_use"]
        calls = tuple(FunctionCall(use["name"], msgspec.json.encode(use["input"]).decode()) for use in uses)
        images = sum(block["type"] == "image" for block in rest)
        turns.append(ConversationTurn(role=role, text=_text(rest), calls=calls, images=images))
    return turns
