"""Translates calls of Anthropic's messages API to chat completions, the only API in which many servers return token
ids.

A final assistant message, which the model would have to continue, and remote tools are refused. Tools that run at
Anthropic are dropped, because coding agents send them with every call; a request that requires one is refused.
``thinking``, ``context_management``, ``effort``, ``cache_control`` and ``disable_parallel_tool_use`` have no effect.
Thinking in answers, and what else the server wants back, is sealed in the thinking's signature
(:mod:`agl_gateway.wire.thoughts`), so that the next request carries it back.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json, Usage
from agl_gateway.wire.chat import (
    ChatEvents,
    ChatMessage,
    Piece,
    answer_format,
    assistant_message,
    chat_completion,
    error_in,
    fields_of,
    file_part,
    first_choice,
    function_choice,
    function_tool,
    image_part,
    pieces_of,
    text_part,
    tool_call,
    tool_messages,
    unsupported,
    usage_of,
    user_message,
)
from agl_gateway.wire.problems import Problem, problem_body
from agl_gateway.wire.thoughts import FIELDS, Unsealer, message_fields, seal
from agl_gateway.wire.translation import ClientApi, as_object, named_event, object_of, objects_in, text_in

SAME = (
    *("temperature", "top_p", "top_k", "max_tokens", "seed", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos", "logit_bias", "chat_template_kwargs"),
)
"""Fields with the same meaning in chat completions; all but the first four are vLLM's."""

_REMOTE = ("mcp_servers", "container")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(asked: Request) -> tuple[Request, tuple[str, ...]]:
    """Translate a messages request to a chat completion; returns the request and the names of the tools left out.

    Raises:
        Problem: 400 if the body is not a JSON object, or asks for a feature that no policy's server has.
    """
    given = fields_of(asked)
    foreign = next((key for key in _REMOTE if given.get(key)), "")
    if foreign:
        raise unsupported(foreign, "let the client run its tools itself")
    tools, dropped = _tools(given)
    body: dict[str, Json] = {"model": asked.model, "messages": [*_messages(given)], **tools}
    body |= {key: given[key] for key in SAME if given.get(key) is not None}
    if given.get("stop_sequences"):
        body["stop"] = given["stop_sequences"]
    form = as_object(given.get("output_format") or as_object(given.get("output_config")).get("format"))
    if form.get("type") == "json_schema":
        body["response_format"] = answer_format(form.get("schema"))
    return chat_completion(body, is_streamed=bool(given.get("stream"))), dropped


def _messages(given: dict[str, Any]) -> Iterator[ChatMessage]:
    if system := _text(_blocks(given.get("system")), between="\n"):
        yield {"role": "system", "content": system}
    messages, unsealer = objects_in(given.get("messages")), Unsealer()
    if messages and messages[-1].get("role") == "assistant":
        raise unsupported("a last message of the assistant to continue", "end the messages with one of the user")
    for message in messages:
        blocks = _blocks(message.get("content"))
        match message.get("role"):
            case "assistant":
                yield _assistant(blocks, unsealer)
            case "system":
                yield {"role": "system", "content": _text(blocks, between="\n")}
            case _:
                yield from _user(blocks)


def _blocks(content: object) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) and content else objects_in(content)


def _text(blocks: list[dict[str, Any]], *, between: str = "") -> str:
    return between.join(text for block in blocks if (text := text_in(block.get("text"))))


def _assistant(blocks: list[dict[str, Any]], unsealer: Unsealer) -> ChatMessage:
    calls = [
        tool_call(text_in(block.get("id")), text_in(block.get("name")), _arguments(block.get("input")))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    return assistant_message(text=_text(blocks), thoughts=[_thoughts(block, unsealer) for block in blocks], calls=calls)


def _thoughts(block: dict[str, Any], unsealer: Unsealer) -> dict[str, Any]:
    sealed = as_object(unsealer.read(block.get("signature")))
    return message_fields(sealed, text_in((sealed or block).get("thinking")))


def _arguments(given: object) -> str:
    return given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()


def _user(blocks: list[dict[str, Any]]) -> Iterator[ChatMessage]:
    """Yield the tool results as tool messages, then one user message with all other parts.

    That message holds the images of the results and the user's own parts.
    """
    rest: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            parts = [_part(one) for one in _blocks(block.get("content"))]
            result, others = tool_messages(text_in(block.get("tool_use_id")), parts)
            yield result
            rest += others
    rest += [_part(block) for block in blocks if block and block.get("type") != "tool_result"]
    yield from user_message(rest)


def _part(block: dict[str, Any]) -> dict[str, Any]:
    source = as_object(block.get("source"))
    kind = text_in(block.get("type"))
    data, url = text_in(source.get("data")), text_in(source.get("url"))
    inline = f"data:{text_in(source.get('media_type'))};base64,{data}"
    match kind:
        case "text":
            return text_part(text_in(block.get("text")))
        case "image" if data or url:
            return image_part(url or inline)
        case "document" if source.get("type") == "text":
            return text_part(data)
        case "document" if data:
            return file_part(inline)
        case "tool_reference":
            return text_part(text_in(block.get("tool_name")))
        case _:
            raise unsupported(f"content of type {kind[:80]!r}", "send text, images or documents themselves")


def _tools(given: dict[str, Any]) -> tuple[dict[str, Json], tuple[str, ...]]:
    declared, dropped = list[Json](), list[str]()
    for tool in objects_in(given.get("tools")):
        if tool.get("type", "custom") in ("custom", None) or "input_schema" in tool:
            schema = tool.get("input_schema")
            declared.append(function_tool(tool.get("name"), description=tool.get("description"), parameters=schema))
        else:
            dropped.append(text_in(tool.get("name")) or text_in(tool.get("type")))
    chosen = as_object(given.get("tool_choice"))
    if chosen.get("name") in dropped or (chosen.get("type") in ("any", "tool") and not declared):
        raise unsupported(f"the tool {chosen.get('name') or ', '.join(dropped)}", "declare a tool of your own")
    if not declared:
        return {}, tuple(dropped)
    choice = function_choice(chosen.get("name")) if chosen.get("type") == "tool" else None
    choice = choice or _CHOICES.get(text_in(chosen.get("type")))
    return {"tools": declared, **({"tool_choice": choice} if choice else {})}, tuple(dropped)


_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_PING = named_event({"type": "ping"})


class MessagesTranslation:
    """Translates a call of the messages API to a chat completion, and the answer back."""

    client_api: ClientApi = "messages"
    content_type = "text/event-stream"

    def __init__(self) -> None:
        self.dropped: tuple[str, ...] = ()
        self._model = ""

    def asked(self, request: Request) -> Request:
        """Return the request as a chat completion, with the sealed thoughts of earlier answers restored."""
        self._model = request.model
        asked, self.dropped = chat_of_messages(request)
        return asked

    def answer(self, body: bytes) -> bytes:
        """Translate a complete (not streamed) chat completion to a response of the messages API."""
        given = object_of(body)
        choice = first_choice(given)
        pieces = pieces_of(as_object(choice.get("message")))
        reason, stop = text_in(choice.get("finish_reason")), text_in(choice.get("stop_reason"))
        ending = _ending(reason, stop, has_calls=any(piece.kind == "call" for piece in pieces))
        content = [_whole(piece) for piece in pieces]
        head = _head(given, self._model)
        return msgspec.json.encode({**head, "content": content, **ending, "usage": _usage(usage_of(given))})

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error of the policy's server in Anthropic's format, with the server's message."""
        message, code = error_in(object_of(body), body)
        return failure_of(status, message, code)

    def stream(self) -> "MessagesStream":
        """Return a translator for the streamed answer."""
        return MessagesStream(self._model)


def failure_of(status: int, message: str, code: str) -> bytes:
    """Return an error in Anthropic's format; a prompt that is too long gets the words on which Claude Code compacts."""
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
    """Return the token usage in Anthropic's form, whose input count excludes cached tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached - usage.written,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }


def _block(piece: Piece, text: str) -> dict[str, Json]:
    """Return a content block with ``text``; for a tool call, ``text`` is the JSON of its arguments."""
    match piece.kind:
        case "thought":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
        case "call":
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": object_of(text.encode())}


def _whole(piece: Piece) -> dict[str, Json]:
    block = _block(piece, piece.text)
    return {**block, "signature": seal({FIELDS: piece.fields})} if piece.kind == "thought" else block


class MessagesStream:
    """Translates a streamed chat completion to the events of the messages API.

    The end of the message is held back until the usage arrives. A tool call is passed on whole; while the model writes
    the call, pings keep the client waiting.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._chat = ChatEvents()
        self._index = -1
        self._has_calls = False
        self._is_failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the client's events for the next bytes of the chat completion."""
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
        """Return the last events of the message, or an error event if the answer is incomplete."""
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
            yield {"type": "content_block_start", "index": self._index, "content_block": _block(piece, "")}
        elif step == "grown":
            kind, key = _DELTAS[piece.kind]
            yield self._delta({"type": kind, key: text})
        else:
            if piece.kind == "thought":
                yield self._delta({"type": "signature_delta", "signature": _whole(piece)["signature"]})
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Json]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _error(self, message: str, code: str) -> bytes:
        self._is_failed = True
        return b"event: error\ndata: %b\n\n" % failure_of(500, message, code)


_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
