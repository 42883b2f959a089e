"""Reads and writes ``POST /v1/completions``: one or more prompts, as text or token ids; choices hold the token ids."""

from collections.abc import Iterator
from typing import Any

from agl_testing.model_server.answer import DONE, Piece, ScriptedAnswer, ScriptedExchange, data_event, logprobs_of
from agl_testing.model_server.codec import ConversationTurn, decode, encode


def turns_of(body: dict[str, Any]) -> tuple[ConversationTurn, ...]:
    """Return each prompt as a user turn."""
    return tuple(ConversationTurn(role="user", text=decode(ids)) for ids in prompts_of(body))


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of each prompt; the request's prompt is a text, a list of ids, or a list of either."""
    prompt = body.get("prompt", "")
    if isinstance(prompt, str):
        return [encode(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return [encode(one) if isinstance(one, str) else one for one in prompt]


def body_of(exchange: ScriptedExchange) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    choices = [_choice(exchange, index, answer) for index, answer in enumerate(exchange.answers)]
    return {**_head(exchange), "choices": choices, "usage": _usage(exchange)}


def events_of(exchange: ScriptedExchange) -> Iterator[bytes]:
    """Yield the events of the streamed response; only the first event of each choice has the prompt's ids."""
    for index, answer in enumerate(exchange.answers):
        for position, piece in enumerate(answer.pieces):
            chunk = {**_head(exchange), "choices": [_piece_choice(exchange, index, answer, piece)]}
            if exchange.wants_ids and position == 0:
                chunk["choices"][0]["prompt_token_ids"] = exchange.prompt_of(index)
            yield data_event(chunk)
    if exchange.includes_usage:
        yield data_event({**_head(exchange), "choices": [], "usage": _usage(exchange)})
    yield DONE


def _head(exchange: ScriptedExchange) -> dict[str, Any]:
    return {
        "id": f"cmpl-{exchange.number}",
        "object": "text_completion",
        "created": exchange.created,
        "model": exchange.model,
    }


def _choice(exchange: ScriptedExchange, index: int, answer: ScriptedAnswer) -> dict[str, Any]:
    out: dict[str, Any] = {
        "index": index,
        "text": answer.text,
        "logprobs": _logprobs(exchange, answer.ids, 0),
        "finish_reason": answer.reason,
    }
    if exchange.wants_ids:
        out["token_ids"] = answer.ids
        out["prompt_token_ids"] = exchange.prompt_of(index)
    return out


def _piece_choice(exchange: ScriptedExchange, index: int, answer: ScriptedAnswer, piece: Piece) -> dict[str, Any]:
    out: dict[str, Any] = {
        "index": index,
        "text": piece.text,
        "logprobs": _logprobs(exchange, piece.ids, piece.start),
        "finish_reason": answer.reason if piece.kind == "end" else None,
    }
    if exchange.wants_ids:
        out["token_ids"] = piece.ids
    return out


def _logprobs(exchange: ScriptedExchange, ids: list[int], start: int) -> dict[str, Any] | None:
    if exchange.body.get("logprobs") is None:
        return None
    return {
        "tokens": [decode([token]) for token in ids],
        "token_logprobs": logprobs_of(ids, start),
        "top_logprobs": [],
        "text_offset": list(range(start, start + len(ids))),
    }


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
