"""Writes chat completions as answers of OpenAI's responses: whole, as numbered events, and errors.

Thoughts are sealed in ``encrypted_content`` (:mod:`agl_gateway.wire.thoughts`), so that clients without a memory on the
server bring them back in the next request.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat_answers import ChatEvents, Piece, Usage, error_in, first_choice, pieces_of, usage_of
from agl_gateway.wire.problems import Problem, problem_body
from agl_gateway.wire.responses_requests import INPUT, ReadResponses, ToolName, chat_of_responses
from agl_gateway.wire.thoughts import restored, sealed_item
from agl_gateway.wire.translation import Shape, as_object, named_event, object_of, text_in

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "tools", "top_p")
_DEFAULTS: dict[str, Json] = {"metadata": {}, "tool_choice": "auto", "tools": []}

Item = dict[str, Json]


class ResponsesTranslation:
    """Translates a call of responses to a chat completion, and back."""

    shape: Shape = "responses"
    content_type = "text/event-stream"

    def __init__(self) -> None:
        self.dropped: tuple[str, ...] = ()
        self._writer = _Writer({}, "", {})

    def asked(self, request: Request) -> Request:
        """Return the request as a chat completion; thoughts of earlier answers are restored."""
        read: ReadResponses = chat_of_responses(restored(request))
        self.dropped = read.dropped
        echoed = {key: value for key in _ECHOED if (value := request.get(key)) is not None}
        self._writer = _Writer({**_DEFAULTS, **echoed}, request.model, read.tools)
        return read.request

    def answer(self, body: bytes) -> bytes:
        """Return a chat completion as one response."""
        given = object_of(body)
        choice = first_choice(given)
        pieces = pieces_of(as_object(choice.get("message")))
        items = [self._writer.item(piece, index, given) for index, piece in enumerate(pieces)]
        reason = text_in(choice.get("finish_reason"))
        return msgspec.json.encode(self._writer.ended(given, items, reason=reason, usage=usage_of(given)))

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error with the message of the policy's server."""
        message, code = error_in(object_of(body), body)
        return problem_body(Problem(status, message, code=code), "responses")

    def stream(self) -> "ResponsesStream":
        """Return what translates the streamed answer."""
        return ResponsesStream(self._writer)


class _Writer:
    """Writes responses and their items.

    Args:
        about: The fields that a response repeats of its request.
        model: The model that was asked for.
        tools: The names of tools in responses, by those in chat completions.
    """

    def __init__(self, about: dict[str, Json], model: str, tools: dict[str, ToolName]) -> None:
        self._about = about
        self._model = model
        self._tools = tools

    def response(self, given: dict[str, Any], *, status: str, output: list[Item]) -> dict[str, Any]:
        """Return a response of this status."""
        created = given.get("created")
        return {
            "id": self._id("resp", given),
            "object": "response",
            "created_at": created if isinstance(created, int) else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": text_in(given.get("model")) or self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            **self._about,
            "usage": None,
        }

    def ended(self, given: dict[str, Any], output: list[Item], *, reason: str, usage: Usage) -> dict[str, Any]:
        """Return a response that is complete, or was cut for the reason that it then names."""
        cut = _INCOMPLETE.get(reason, "")
        response = self.response(given, status="incomplete" if cut else "completed", output=output)
        return {**response, "incomplete_details": {"reason": cut} if cut else None, "usage": usage_of_response(usage)}

    def item(self, piece: Piece, index: int, given: dict[str, Any]) -> Item:
        """Return a whole item."""
        match piece.kind:
            case "thought":
                content = [{"type": "reasoning_text", "text": piece.text}]
                head: Item = {"id": self._id("rs", given, index), "type": "reasoning"}
                return sealed_item({**head, "summary": [], "content": content})
            case "text":
                head = {"id": self._id("msg", given, index), "type": "message", "role": "assistant"}
                return {**head, "status": "completed", "content": [_text_part(piece.text)]}
            case "call":
                return {**self._call(piece, index, given), "status": "completed"}

    def _call(self, piece: Piece, index: int, given: dict[str, Any]) -> Item:
        tool = self._tools.get(piece.name) or ToolName(name=piece.name)
        named: Item = {"call_id": piece.id, "name": tool.name}
        if tool.namespace:
            named["namespace"] = tool.namespace
        if tool.is_free_form:
            found = object_of(piece.text.encode()).get(INPUT)
            text = found if isinstance(found, str) else piece.text
            return {"id": self._id("ctc", given, index), "type": "custom_tool_call", **named, "input": text}
        return {"id": self._id("fc", given, index), "type": "function_call", **named, "arguments": piece.text}

    def _id(self, kind: str, given: dict[str, Any], index: int | None = None) -> str:
        return f"{kind}_{text_in(given.get('id'))}{'' if index is None else f'_{index}'}"


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_of_response(usage: Usage) -> dict[str, Json]:
    """Return the usage as a response has it."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.thoughts},
        "total_tokens": usage.prompt + usage.answer,
    }


class ResponsesStream:
    """Translates the events of a chat completion; the end of the response waits for the usage, which comes after it."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._chat = ChatEvents()
        self._output: list[Item] = []
        self._item: Item = {}
        self._count = 0
        self._is_failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the events for the bytes that have arrived."""
        found = list[bytes]()
        for one in self._chat.chunks(chunk):
            if one.get("error"):
                found.append(self._failed(*error_in(one)))
                continue
            found += self._beginning(one)
            for change in self._chat.changes(one):
                found += self._events(*change)
        return b"".join(found)

    def end(self) -> bytes:
        """Return the end of the response; a failure where the answer has no end."""
        if self._is_failed:
            return b""
        reason = self._chat.reason
        if not reason:
            return self._failed("the policy's stream ended before its answer did", "")
        ended = self._writer.ended(self._chat.head, self._output, reason=reason, usage=self._chat.usage)
        return self._event(f"response.{ended['status']}", response=ended)

    def _beginning(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        """Yield the beginning of the response, unless it has begun."""
        if self._count:
            return
        started = self._writer.response(chunk, status="in_progress", output=[])
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=started)

    def _events(self, step: str, piece: Piece, text: str) -> Iterator[bytes]:
        index = len(self._output)
        if step != "grown":  # a call is whole when it opens; sealing thoughts with every token would cost much
            self._item = self._writer.item(piece, index, self._chat.head)
        item = self._item
        where: dict[str, Json] = {"item_id": item["id"], "output_index": index}
        if step == "opened":
            yield self._event("response.output_item.added", output_index=index, item=_begun(item))
        if piece.kind == "call":
            yield from self._call(step, item, where, text)
        else:
            yield from self._content(step, piece, where, text)
        if step == "closed":
            yield self._event("response.output_item.done", output_index=index, item=item)
            self._output.append(item)

    def _content(self, step: str, piece: Piece, where: dict[str, Json], text: str) -> Iterator[bytes]:
        is_text = piece.kind == "text"
        kind = "response.output_text" if is_text else "response.reasoning_text"
        where = {**where, "content_index": 0}
        logprobs: dict[str, Json] = {"logprobs": []} if is_text else {}
        if step == "opened":
            yield self._event("response.content_part.added", **where, part=_part(piece.kind, ""))
        elif step == "grown":
            yield self._event(f"{kind}.delta", **where, delta=text, **logprobs)
        else:
            yield self._event(f"{kind}.done", **where, text=piece.text, **logprobs)
            yield self._event("response.content_part.done", **where, part=_part(piece.kind, piece.text))

    def _call(self, step: str, item: Item, where: dict[str, Json], text: str) -> Iterator[bytes]:
        is_free = item["type"] == "custom_tool_call"
        kind = "response.custom_tool_call_input" if is_free else "response.function_call_arguments"
        if step == "grown":
            yield self._event(f"{kind}.delta", **where, delta=item["input"] if is_free else text)
        elif step == "closed":
            whole = {"input": item["input"]} if is_free else {"arguments": item["arguments"], "name": item["name"]}
            yield self._event(f"{kind}.done", **where, **whole)

    def _failed(self, message: str, code: str) -> bytes:
        self._is_failed = True
        begun = b"".join(self._beginning(self._chat.head))
        failed = self._writer.response(self._chat.head, status="failed", output=self._output)
        error: dict[str, Json] = {"code": code or "server_error", "message": message}
        return begun + self._event("response.failed", response={**failed, "error": error})

    def _event(self, kind: str, **fields: Json) -> bytes:
        event = named_event({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1
        return event


def _part(kind: str, text: str) -> Item:
    return _text_part(text) if kind == "text" else {"type": "reasoning_text", "text": text}


def _begun(item: Item) -> Item:
    """Return an item as it is before its content."""
    empty: Item = {"arguments": "", "input": "", "content": [], "status": "in_progress"}
    kept = {key: value for key, value in item.items() if key != "encrypted_content"}
    return {**kept, **{key: value for key, value in empty.items() if key in item}}
