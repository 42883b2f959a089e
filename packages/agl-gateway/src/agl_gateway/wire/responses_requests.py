"""Reads requests of OpenAI's responses as chat completions, for policies whose servers give token ids only there.

The items that the model wrote in a row, its thoughts, texts and tool calls, are one message again. Tools in a namespace
get its name in front of theirs, and a free-form tool becomes a function of one text. What needs a server's memory is
refused. Tools that run at OpenAI are dropped, because coding agents send them with every call; a request that insists
on one is refused. ``reasoning``, ``truncation``, ``verbosity`` and ``parallel_tool_calls`` have no effect.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat_requests import (
    ChatMessage,
    answer_format,
    assistant_message,
    audio_part,
    chat_completion,
    fields_of,
    file_part,
    function_choice,
    function_tool,
    image_part,
    text_part,
    tool_call,
    tool_messages,
    unsupported,
    user_message,
)
from agl_gateway.wire.messages_requests import SAME
from agl_gateway.wire.translation import as_object, objects_in, text_in

INPUT = "input"
"""The one argument of a function that stands for a free-form tool."""

_REMEMBERED = ("previous_response_id", "conversation", "prompt", "background")
_REMOTE_ADVICE = "send the whole conversation as input, with store = false"
_FREE_FORM: dict[str, Json] = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_CALLS = ("function_call", "custom_tool_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolName:
    """The name of a tool in responses, and whether its input is free text."""

    name: str
    namespace: str = ""
    is_free_form: bool = False


@dataclass(frozen=True, slots=True)
class ReadResponses:
    """A request as a chat completion, the tools by their names there, and the names of what was dropped."""

    request: Request
    tools: dict[str, ToolName] = field(default_factory=dict[str, ToolName])
    dropped: tuple[str, ...] = ()


def chat_of_responses(asked: Request) -> ReadResponses:
    """Return a request of responses as a chat completion.

    Raises:
        Problem: 400 for a body that is no JSON object, or asks for something that no policy's server has.
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
    """Return the name of a tool in a chat completion."""
    space = text_in(namespace)
    return f"{space}{'' if not space or space.endswith('__') else '__'}{text_in(name)}"


def messages_of(given: dict[str, Any]) -> list[ChatMessage]:
    """Return the instructions and the input as chat messages."""
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
    """Puts the items of a conversation together to messages."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._said: list[dict[str, Any]] = []
        self._after_results: list[dict[str, Any]] = []

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
            self._message("user", [text_part(_summary(item))])
        elif kind == "item_reference":
            raise unsupported("item_reference", _REMOTE_ADVICE)

    def add(self, *messages: ChatMessage) -> None:
        """Add messages after everything that is open."""
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
        reasoning = "".join(_thoughts(item) for item in said if item.get("type") == "reasoning")
        if said and (calls or text or reasoning):
            self._messages.append(assistant_message(text=text, reasoning=reasoning, calls=calls))


def _text(item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    return "".join(text_in(part.get("text")) or text_in(part.get("refusal")) for part in objects_in(content))


def _thoughts(item: dict[str, Any]) -> str:
    return _text(item) or "\n".join(text_in(part.get("text")) for part in objects_in(item.get("summary")))


def _call(item: dict[str, Any]) -> Json:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({INPUT: text_in(item.get("input"))}).decode()
    name = chat_name(item.get("name"), item.get("namespace"))
    return tool_call(text_in(item.get("call_id")) or text_in(item.get("id")), name, text_in(arguments) or "{}")


def _summary(item: dict[str, Any]) -> str:
    summary = item.get("summary")  # restored from its sealed content
    if not isinstance(summary, str):
        raise unsupported("a compaction of another server", "start a new conversation")
    return summary


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
    """Reads the tools of a request."""

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
        """Return the choice of a chat completion, and the names of the allowed tools where some are not."""
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
