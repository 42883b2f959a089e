"""Writes chat completions as answers of Anthropic's messages: whole, as named events, and errors.

Thinking is sealed in its signature (:mod:`agl_gateway.wire.thoughts`), so that it comes back in the next request.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat_answers import ChatEvents, Piece, Usage, error_in, first_choice, pieces_of, usage_of
from agl_gateway.wire.messages_requests import chat_of_messages
from agl_gateway.wire.problems import Problem, problem_body
from agl_gateway.wire.thoughts import restored, signed_block
from agl_gateway.wire.translation import Shape, as_object, named_event, object_of, text_in

_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_PING = named_event({"type": "ping"})


class MessagesTranslation:
    """Translates a call of messages to a chat completion, and back."""

    shape: Shape = "messages"
    content_type = "text/event-stream"

    def __init__(self) -> None:
        self.dropped: tuple[str, ...] = ()
        self._model = ""

    def asked(self, request: Request) -> Request:
        """Return the request as a chat completion; thoughts of earlier answers are restored."""
        read = chat_of_messages(restored(request))
        self.dropped, self._model = read.dropped, request.model
        return read.request

    def answer(self, body: bytes) -> bytes:
        """Return a chat completion as one message."""
        given = object_of(body)
        choice = first_choice(given)
        pieces = pieces_of(as_object(choice.get("message")))
        reason, stop = text_in(choice.get("finish_reason")), text_in(choice.get("stop_reason"))
        head = _head(given, self._model)
        return msgspec.json.encode(
            {
                **head,
                "content": [_whole(piece) for piece in pieces],
                **_ending(reason, stop, has_calls=any(piece.kind == "call" for piece in pieces)),
                "usage": _usage(usage_of(given)),
            }
        )

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error with the message of the policy's server."""
        message, code = error_in(object_of(body), body)
        return failure_of(status, message, code)

    def stream(self) -> "MessagesStream":
        """Return what translates the streamed answer."""
        return MessagesStream(self._model)


def failure_of(status: int, message: str, code: str) -> bytes:
    """Return an error; one about the context's length in words by which Claude Code knows it, and compacts."""
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return problem_body(Problem(status, message), "messages")


def _head(given: dict[str, Any], model: str) -> dict[str, Json]:
    named = text_in(given.get("model")) or model
    return {"id": text_in(given.get("id")), "type": "message", "role": "assistant", "model": named}


def _ending(reason: str, stop: str, *, has_calls: bool) -> dict[str, Json]:
    if stop and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    found = "tool_use" if has_calls and reason == "stop" else _REASONS.get(reason, "end_turn")
    return {"stop_reason": found, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Json]:
    """Return the usage, whose input excludes what was cached."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }


def _whole(piece: Piece) -> dict[str, Json]:
    match piece.kind:
        case "thought":
            return signed_block(_thinking(piece))
        case "text":
            return {"type": "text", "text": piece.text}
        case "call":
            return {**_empty(piece), "input": object_of(piece.text.encode())}


def _thinking(piece: Piece) -> dict[str, Json]:
    return {"type": "thinking", "thinking": piece.text, "signature": ""}


def _empty(piece: Piece) -> dict[str, Json]:
    """Return a block without its text, as it begins in a stream."""
    match piece.kind:
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}


class MessagesStream:
    """Translates the events of a chat completion.

    The end of the message waits for the usage, which comes after it. While a tool call is written, which is passed on
    whole, pings keep clients patient.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._chat = ChatEvents()
        self._index = -1
        self._has_calls = False
        self._is_failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the events for the bytes that have arrived."""
        is_first = not self._chat.head
        found = list[bytes]()
        for one in self._chat.chunks(chunk):
            if one.get("error"):
                found.append(self._error(*error_in(one)))
                continue
            if is_first:
                found.append(self._start(one))
                is_first = False
            found += [named_event(event) for change in self._chat.changes(one) for event in self._events(*change)]
        return b"".join(found) if found or not chunk or not self._chat.head else _PING

    def end(self) -> bytes:
        """Return the end of the message; an error where the answer has none."""
        if self._is_failed:
            return b""
        if not self._chat.reason:
            return self._error("the policy's stream ended before its answer did", "")
        ending = _ending(self._chat.reason, self._chat.stop, has_calls=self._has_calls)
        delta = {"type": "message_delta", "delta": ending, "usage": _usage(self._chat.usage)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def _start(self, chunk: dict[str, Any]) -> bytes:
        prompt = chunk.get("prompt_token_ids")
        usage = Usage(prompt=len(prompt) if isinstance(prompt, list) else 0)  # pyright: ignore[reportUnknownArgumentType]
        nothing: dict[str, Json] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return named_event({"type": "message_start", "message": {**_head(chunk, self._model), **nothing}})

    def _events(self, step: str, piece: Piece, text: str) -> Iterator[dict[str, Any]]:
        if step == "opened":
            self._index += 1
            self._has_calls |= piece.kind == "call"
            yield {"type": "content_block_start", "index": self._index, "content_block": _empty(piece)}
        elif step == "grown":
            yield self._delta(_grown(piece, text))
        else:
            if piece.kind == "thought":
                signature = signed_block(_thinking(piece))["signature"]
                yield self._delta({"type": "signature_delta", "signature": signature})
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Json]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _error(self, message: str, code: str) -> bytes:
        self._is_failed = True
        return b"event: error\ndata: %b\n\n" % failure_of(500, message, code)


def _grown(piece: Piece, text: str) -> dict[str, Json]:
    match piece.kind:
        case "thought":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
