"""Translates calls of OpenAI's responses API to chat completions, the only API in which many servers return token ids.

Consecutive items that the model wrote (thoughts, texts and tool calls) become one message again. A tool in a namespace
gets the namespace as a prefix of its name, and a free-form tool becomes a function with one string argument. Requests
that need a server's memory are refused. Tools that run at OpenAI are dropped, because coding agents send them with
every call; a request that requires one is refused. ``reasoning``, ``truncation``, ``verbosity`` and
``parallel_tool_calls`` have no effect. Thoughts in answers, and what else the server wants back, are sealed in
``encrypted_content`` (:mod:`agl_gateway.wire.thoughts`).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    audio_part,
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
from agl_gateway.wire.messages import SAME
from agl_gateway.wire.problems import Problem, problem_body
from agl_gateway.wire.thoughts import FIELDS, Unsealer, message_fields, seal
from agl_gateway.wire.translation import ClientApi, as_object, named_event, object_of, objects_in, text_in

INPUT = "input"
"""The name of the only argument of a function that stands for a free-form tool."""

_REMEMBERED = ("previous_response_id", "conversation", "prompt", "background")
_REMOTE_ADVICE = "send the whole conversation as input, with store = false"
_FREE_FORM: dict[str, Json] = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_CALLS = ("function_call", "custom_tool_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolName:
    """A tool's name and namespace in the responses API, and whether its input is free text."""

    name: str
    namespace: str = ""
    is_free_form: bool = False


@dataclass(frozen=True, slots=True)
class ReadResponses:
    """A responses request translated to a chat completion.

    It also holds the tools by their names in the chat completion, and the names of the tools that were left out.
    """

    request: Request
    tools: dict[str, ToolName] = field(default_factory=dict[str, ToolName])
    dropped: tuple[str, ...] = ()


def chat_of_responses(asked: Request) -> ReadResponses:
    """Translate a responses request to a chat completion.

    Raises:
        Problem: 400 if the body is not a JSON object, or asks for a feature that no policy's server has.
    """
    given = fields_of(asked)
    foreign = next((key for key in _REMEMBERED if given.get(key)), "")
    if foreign:
        raise unsupported(foreign, _REMOTE_ADVICE)
    tools = _Tools()
    body: dict[str, Json] = {"model": asked.model, "messages": messages_of(given), **tools.read(given)}
    body |= {key: given[key] for key in SAME if given.get(key) is not None}
    if given.get("max_output_tokens") is not None:
        body["max_tokens"] = given["max_output_tokens"]
    form = as_object(as_object(given.get("text")).get("format"))
    if form.get("type") in ("json_schema", "json_object"):
        body["response_format"] = answer_format(form.get("schema"), name=form.get("name"))
    request = chat_completion(body, is_streamed=bool(given.get("stream")))
    return ReadResponses(request, tools.names, tuple(tools.dropped))


def chat_name(name: object, namespace: object) -> str:
    """Return the name of a tool in a chat completion: its namespace, if any, followed by its name."""
    space = text_in(namespace)
    return f"{space}{'' if not space or space.endswith('__') else '__'}{text_in(name)}"


def messages_of(given: dict[str, Any]) -> list[ChatMessage]:
    """Return the instructions and the input of a responses request as chat messages."""
    conversation = _Conversation()
    if instructions := text_in(given.get("instructions")):
        conversation.add({"role": "system", "content": instructions})
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in objects_in(items):
        conversation.item(item)
    return conversation.end()


class _Conversation:
    """Combines consecutive items of a responses request into chat messages."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._said: list[dict[str, Any]] = []
        self._after_results: list[dict[str, Any]] = []
        self._unsealer = Unsealer()

    def item(self, item: dict[str, Any]) -> None:
        kind = text_in(item.get("type")) or "message"
        if kind == "reasoning" or kind in _CALLS or (kind == "message" and item.get("role") == "assistant"):
            self._flush_results()
            self._said.append(item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._flush_answer()
            result, rest = tool_messages(text_in(item.get("call_id")), _parts(item.get("output")))
            self._messages.append(result)
            self._after_results += rest
        elif kind == "message":
            self._message(text_in(item.get("role")), _parts(item.get("content")))
        elif kind in ("compaction", "compaction_summary"):
            self._message("user", [text_part(self._summary(item))])
        elif kind == "item_reference":
            raise unsupported("item_reference", _REMOTE_ADVICE)

    def add(self, *messages: ChatMessage) -> None:
        """Add messages after those for the answer and the tool results collected so far."""
        self._flush_answer()
        self._flush_results()
        self._messages += messages

    def end(self) -> list[ChatMessage]:
        self.add()
        return self._messages

    def _message(self, role: str, parts: list[dict[str, Any]]) -> None:
        if role in ("system", "developer"):
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
            self.add({"role": "system", "content": text})
        else:
            self.add(*user_message(parts))

    def _flush_results(self) -> None:
        images, self._after_results = self._after_results, []
        self._messages += user_message(images)

    def _flush_answer(self) -> None:
        said, self._said = self._said, []
        calls = [_call(item) for item in said if item.get("type") in _CALLS]
        text = "".join(_text(item) for item in said if item.get("type") not in (*_CALLS, "reasoning"))
        thoughts = [self._thoughts(item) for item in said if item.get("type") == "reasoning"]
        if calls or text or any(thoughts):
            self._messages.append(assistant_message(text=text, thoughts=thoughts, calls=calls))

    def _thoughts(self, item: dict[str, Any]) -> dict[str, Any]:
        sealed = self._sealed(item)
        return message_fields(sealed, _thoughts(sealed or item))

    def _summary(self, item: dict[str, Any]) -> str:
        summary = self._sealed(item).get("summary")
        if not isinstance(summary, str):
            raise unsupported("a compaction of another server", "start a new conversation")
        return summary

    def _sealed(self, item: dict[str, Any]) -> dict[str, Any]:
        return as_object(self._unsealer.read(item.get("encrypted_content")))


def _text(item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    return "".join(text_in(part.get("text")) or text_in(part.get("refusal")) for part in objects_in(content))


def _thoughts(item: dict[str, Any]) -> str:
    return _text(item) or "\n".join(text_in(part.get("text")) for part in objects_in(item.get("summary")))


def _call(item: dict[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({INPUT: text_in(item.get("input"))}).decode()
    name = chat_name(item.get("name"), item.get("namespace"))
    return tool_call(text_in(item.get("call_id")) or text_in(item.get("id")), name, text_in(arguments) or "{}")


def _parts(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return [_part(part) for part in objects_in(content)]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = text_in(part.get("type"))
    match kind:
        case "input_text" | "output_text" | "text":
            return text_part(text_in(part.get("text")))
        case "input_image" if url := text_in(part.get("image_url")):
            return image_part(url)
        case "input_file" if data := text_in(part.get("file_data")):
            return file_part(data)
        case "input_audio" if audio := as_object(part.get("input_audio")):
            return audio_part(text_in(audio.get("data")), text_in(audio.get("format")))
        case _:
            raise unsupported(f"content of type {kind[:80]!r}", "send text, images or files themselves")


class _Tools:
    """Translates a request's tools; records the tools by their chat names, and the names of those it leaves out."""

    def __init__(self) -> None:
        self.names: dict[str, ToolName] = {}
        self.dropped: list[str] = []

    def read(self, given: dict[str, Any]) -> dict[str, Json]:
        declared = [one for tool in objects_in(given.get("tools")) for one in self._tool(tool)]
        choice, allowed = self._choice(given.get("tool_choice"))
        kept = [one for one in declared if allowed is None or one["function"]["name"] in allowed]
        if choice not in (None, "auto", "none") and not kept:
            raise unsupported(f"the tool {', '.join(self.dropped)}", "declare a function of your own")
        return {"tools": kept, **({"tool_choice": choice} if choice else {})} if kept else {}

    def _tool(self, tool: dict[str, Any], namespace: str = "") -> Iterator[dict[str, Any]]:
        kind, name = tool.get("type"), text_in(tool.get("name"))
        if kind == "namespace" and not namespace:
            for one in objects_in(tool.get("tools")):
                yield from self._tool(one, name)
        elif kind in ("function", "custom"):
            is_free = kind == "custom"
            known = chat_name(name, namespace)
            self.names[known] = ToolName(name=name, namespace=namespace, is_free_form=is_free)
            schema = _FREE_FORM if is_free else tool.get("parameters")
            yield function_tool(known, description=tool.get("description"), parameters=schema)
        else:
            self.dropped.append(text_in(kind))

    def _choice(self, choice: object) -> tuple[Json, list[str] | None]:
        """Return the ``tool_choice`` for a chat completion, and the names of the allowed tools (``None`` for all)."""
        chosen = as_object(choice)
        match chosen.get("type"):
            case None:
                return text_in(choice) or None, None
            case "function" | "custom":
                return function_choice(chat_name(chosen.get("name"), chosen.get("namespace"))), None
            case "allowed_tools":
                allowed = [chat_name(one.get("name"), one.get("namespace")) for one in objects_in(chosen.get("tools"))]
                return text_in(chosen.get("mode")) or None, allowed
            case other:
                raise unsupported(f"the tool {text_in(other)[:80]}", "declare a function of your own")


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "tools", "top_p")
_DEFAULTS: dict[str, Json] = {"metadata": {}, "tool_choice": "auto", "tools": []}

Item = dict[str, Json]


class ResponsesTranslation:
    """Translates a call of the responses API to a chat completion, and the answer back."""

    client_api: ClientApi = "responses"
    content_type = "text/event-stream"

    def __init__(self) -> None:
        self.dropped: tuple[str, ...] = ()
        self._writer = _Writer({}, "", {})

    def asked(self, request: Request) -> Request:
        """Return the request as a chat completion, with the sealed thoughts of earlier answers restored."""
        read: ReadResponses = chat_of_responses(request)
        self.dropped = read.dropped
        echoed = {key: value for key in _ECHOED if (value := request.get(key)) is not None}
        self._writer = _Writer({**_DEFAULTS, **echoed}, request.model, read.tools)
        return read.request

    def answer(self, body: bytes) -> bytes:
        """Translate a complete (not streamed) chat completion to a response of the responses API."""
        given = object_of(body)
        choice = first_choice(given)
        pieces = pieces_of(as_object(choice.get("message")))
        items = [self._writer.item(piece, index, given) for index, piece in enumerate(pieces)]
        reason = text_in(choice.get("finish_reason"))
        return msgspec.json.encode(self._writer.ended(given, items, reason=reason, usage=usage_of(given)))

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error of the policy's server in OpenAI's format, with the server's message."""
        message, code = error_in(object_of(body), body)
        return problem_body(Problem(status, message, code=code), "responses")

    def stream(self) -> "ResponsesStream":
        """Return a translator for the streamed answer."""
        return ResponsesStream(self._writer)


class _Writer:
    """Writes responses and their items in the form of the responses API.

    Args:
        about: The request's fields that a response repeats.
        model: The model that the request names.
        tools: The tools' names in responses, by their names in chat completions.
    """

    def __init__(self, about: dict[str, Json], model: str, tools: dict[str, ToolName]) -> None:
        self._about = about
        self._model = model
        self._tools = tools

    def response(self, given: dict[str, Any], *, status: str, output: list[Item]) -> dict[str, Any]:
        """Return a response object with this status and output."""
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
        """Return the final response: ``completed``, or ``incomplete`` if the finish ``reason`` says so."""
        cut = _INCOMPLETE.get(reason, "")
        response = self.response(given, status="incomplete" if cut else "completed", output=output)
        return {**response, "incomplete_details": {"reason": cut} if cut else None, "usage": usage_of_response(usage)}

    def item(self, piece: Piece, index: int, given: dict[str, Any]) -> Item:
        """Return the output item that holds a piece of the answer."""
        match piece.kind:
            case "thought":
                content = [_content_part("thought", piece.text)] if piece.text else []
                sealed: Item = {"encrypted_content": seal({FIELDS: piece.fields})} if piece.fields else {}
                head: Item = {"id": self._id("rs", given, index), "type": "reasoning"}
                return {**head, "summary": [], "content": content, **sealed}
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
    """Return the token usage in the form of the responses API."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.thoughts},
        "total_tokens": usage.prompt + usage.answer,
    }


class ResponsesStream:
    """Translates a streamed chat completion to the events of the responses API.

    The end of the response is held back until the usage arrives.
    """

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._chat = ChatEvents()
        self._output: list[Item] = []
        self._item: Item = {}
        self._count = 0
        self._is_failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the client's events for the next bytes of the chat completion."""
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
        """Return the last event of the response, or a failure if the answer is incomplete."""
        if self._is_failed:
            return b""
        reason = self._chat.reason
        if not reason:
            return self._failed("the policy's stream ended before its answer did", "")
        ended = self._writer.ended(self._chat.head, self._output, reason=reason, usage=self._chat.usage)
        return self._event(f"response.{ended['status']}", response=ended)

    def _beginning(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events that open the response; nothing if they were sent before."""
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
        if step == "grown":
            if len(piece.parts) == 1:
                yield self._event("response.content_part.added", **where, part=_content_part(piece.kind, ""))
            yield self._event(f"{kind}.delta", **where, delta=text, **logprobs)
        elif step == "closed" and piece.text:
            yield self._event(f"{kind}.done", **where, text=piece.text, **logprobs)
            yield self._event("response.content_part.done", **where, part=_content_part(piece.kind, piece.text))

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


def _content_part(kind: str, text: str) -> Item:
    return _text_part(text) if kind == "text" else {"type": "reasoning_text", "text": text}


def _begun(item: Item) -> Item:
    """Return the item as it is sent when it opens: in progress, with empty content."""
    empty: Item = {"arguments": "", "input": "", "content": [], "status": "in_progress"}
    kept = {key: value for key, value in item.items() if key != "encrypted_content"}
    return {**kept, **{key: value for key, value in empty.items() if key in item}}
