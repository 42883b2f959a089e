"""Reads requests of Anthropic's messages as chat completions, for policies whose servers give token ids only there.

A last message of the assistant, which the model would have to continue, and remote tools are refused. Tools that run at
Anthropic are dropped, because coding agents send them with every call; a request that insists on one is refused.
``thinking``, ``context_management``, ``effort``, ``cache_control`` and ``disable_parallel_tool_use`` have no effect.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat_requests import (
    ChatMessage,
    answer_format,
    assistant_message,
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
from agl_gateway.wire.translation import as_object, objects_in, text_in

SAME = (
    *("temperature", "top_p", "top_k", "max_tokens", "seed", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos", "logit_bias", "chat_template_kwargs"),
)
"""Fields that mean the same in chat completions; all but the first four are those of vLLM."""

_REMOTE = ("mcp_servers", "container")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """A request as a chat completion, and the names of what was dropped from it."""

    request: Request
    dropped: tuple[str, ...] = ()


def chat_of_messages(asked: Request) -> ReadMessages:
    """Return a request of messages as a chat completion.

    Raises:
        Problem: 400 for a body that is no JSON object, or asks for something that no policy's server has.
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
    return ReadMessages(chat_completion(body, is_streamed=bool(given.get("stream"))), dropped)


def _messages(given: dict[str, Any]) -> Iterator[ChatMessage]:
    if system := _text(_blocks(given.get("system")), between="\n"):
        yield {"role": "system", "content": system}
    messages = objects_in(given.get("messages"))
    if messages and messages[-1].get("role") == "assistant":
        raise unsupported("a last message of the assistant to continue", "end the messages with one of the user")
    for message in messages:
        blocks = _blocks(message.get("content"))
        match message.get("role"):
            case "assistant":
                yield _assistant(blocks)
            case "system":
                yield {"role": "system", "content": _text(blocks, between="\n")}
            case _:
                yield from _user(blocks)


def _blocks(content: object) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) and content else objects_in(content)


def _text(blocks: list[dict[str, Any]], *, between: str = "", key: str = "text") -> str:
    return between.join(text for block in blocks if (text := text_in(block.get(key))))


def _assistant(blocks: list[dict[str, Any]]) -> ChatMessage:
    calls = [
        tool_call(text_in(block.get("id")), text_in(block.get("name")), _arguments(block.get("input")))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    return assistant_message(text=_text(blocks), reasoning=_text(blocks, key="thinking"), calls=calls)


def _arguments(given: object) -> str:
    return given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()


def _user(blocks: list[dict[str, Any]]) -> Iterator[ChatMessage]:
    """Yield the results of tools, then the user's words with the images of the results before them."""
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
