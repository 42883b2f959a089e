"""Reads and writes ``POST /v1/chat/completions``: converts requests to turns, and exchanges to bodies and chunks."""

from collections.abc import Iterator
from typing import Any, cast

from agl_testing.model_server.answer import DONE, Piece, ScriptedAnswer, ScriptedExchange, content_logprobs, data_event
from agl_testing.model_server.codec import ConversationTurn, FunctionCall


def turns_of(body: dict[str, Any]) -> tuple[ConversationTurn, ...]:
    """Return the messages of a chat request as turns."""
    return tuple(_turn(message) for message in body.get("messages", ()))


def body_of(exchange: ScriptedExchange) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    choices = [_choice(exchange, index, answer) for index, answer in enumerate(exchange.answers)]
    out = {**_head(exchange, "chat.completion"), "choices": choices, "usage": _usage(exchange)}
    if exchange.wants_ids and exchange.flavour != "sglang":
        out["prompt_token_ids"] = exchange.prompts[0]
    return out


def events_of(exchange: ScriptedExchange) -> Iterator[bytes]:
    """Yield the events of the streamed response; as in vLLM, only the first event has ``prompt_token_ids``."""
    for index in range(len(exchange.answers)):
        first = _chunk(exchange, index, {"role": "assistant", "content": ""})
        if exchange.wants_ids and index == 0:
            first["prompt_token_ids"] = exchange.prompts[0]
        yield data_event(first)
    for index, answer in enumerate(exchange.answers):
        for piece in answer.pieces:
            yield data_event(_piece_chunk(exchange, index, answer, piece))
    if exchange.includes_usage:
        yield data_event({**_head(exchange, "chat.completion.chunk"), "choices": [], "usage": _usage(exchange)})
    yield DONE


def _turn(message: dict[str, Any]) -> ConversationTurn:
    text, images = _content(message.get("content"))
    calls = tuple(
        FunctionCall(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return ConversationTurn(role=message["role"], text=text, calls=calls, images=images)


def _content(content: object) -> tuple[str, int]:
    if not isinstance(content, list):
        return str(content or ""), 0
    parts = cast("list[dict[str, Any]]", content)
    text = "".join(part.get("text", "") for part in parts if part.get("type") == "text")
    return text, sum(part.get("type") == "image_url" for part in parts)


def _head(exchange: ScriptedExchange, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{exchange.number}", "object": kind, "created": exchange.created, "model": exchange.model}


def _choice(exchange: ScriptedExchange, index: int, answer: ScriptedAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [_tool_call(answer, call) for call in range(len(answer.calls))]
    out: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(exchange, answer.ids, 0),
        "finish_reason": answer.reason,
    }
    if exchange.wants_ids and exchange.flavour != "sglang":
        out["token_ids"] = answer.ids
    elif exchange.wants_ids:
        out["response_token_ids"] = answer.ids
    if exchange.flavour == "sglang" and exchange.body.get("return_prompt_token_ids"):
        out["prompt_token_ids"] = exchange.prompts[0]
    return out


def _tool_call(answer: ScriptedAnswer, call: int) -> dict[str, Any]:
    function = {"name": answer.calls[call].name, "arguments": answer.calls[call].arguments}
    return {"id": answer.call_ids[call], "type": "function", "function": function}


def _logprobs(exchange: ScriptedExchange, ids: list[int], start: int) -> dict[str, Any] | None:
    if not exchange.body.get("logprobs"):
        return None
    return {"content": content_logprobs(ids, start, with_top=bool(exchange.body.get("top_logprobs"))), "refusal": None}


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _chunk(exchange: ScriptedExchange, index: int, delta: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return {**_head(exchange, "chat.completion.chunk"), "choices": [choice]}


def _piece_chunk(exchange: ScriptedExchange, index: int, answer: ScriptedAnswer, piece: Piece) -> dict[str, Any]:
    chunk = _chunk(exchange, index, _delta(answer, piece))
    choice = chunk["choices"][0]
    choice["logprobs"] = _logprobs(exchange, piece.ids, piece.start)
    if exchange.wants_ids:
        choice["token_ids"] = piece.ids
    if piece.kind == "end":
        choice["finish_reason"] = answer.reason
    return chunk


def _delta(answer: ScriptedAnswer, piece: Piece) -> dict[str, Any]:
    if piece.kind == "text":
        return {"content": piece.text}
    if piece.kind == "call":
        call = _tool_call(answer, piece.call)
        return {"tool_calls": [{"index": piece.call, **call, "function": {"name": piece.text, "arguments": ""}}]}
    if piece.kind == "arguments":
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    return {}
