"""Converts any dialect's call to OpenAI chat messages, for exports, fine-tuning and prompt optimisers."""

from collections.abc import Iterable
from typing import Any

import msgspec

from agl.dialects._foreign import as_dict, as_text, dicts_in, is_list
from agl.schemas import Json, ModelCall

Message = dict[str, Json]


def call_messages(call: ModelCall) -> list[Message]:
    """The conversation of ``call``, including its answer if there is one, as OpenAI chat messages.

    Text that a dialect splits into parts is joined. Tool calls and their results keep their ids. Media remain separate
    parts with their references. Parts that chat messages cannot express (reasoning items, server tools) are left out.
    """
    request, response = as_dict(call.request), as_dict(call.response)
    match call.dialect:
        case "chat":
            return [*dicts_in(request.get("messages")), *_chat_answer(response)]
        case "completions":
            return [*_prompt(request.get("prompt")), *_completion(response)]
        case "responses":
            return _responses(request, response)
        case "messages":
            return _anthropic(request, response)
        case "embeddings":
            return _prompt(request.get("input"))


def _chat_answer(response: dict[str, Any]) -> list[Message]:
    messages = [choice.get("message") for choice in dicts_in(response.get("choices"))[:1]]
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in dicts_in(messages)
    ]


def _prompt(prompt: Any) -> list[Message]:
    text = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode() if prompt else ""
    return [{"role": "user", "content": text}] if text else []


def _completion(response: dict[str, Any]) -> list[Message]:
    return [
        {"role": "assistant", "content": choice.get("text") or ""} for choice in dicts_in(response.get("choices"))[:1]
    ]


def _responses(request: dict[str, Any], response: dict[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if isinstance(request.get("instructions"), str):
        messages.append({"role": "system", "content": request["instructions"]})
    given = request.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    for item in (*dicts_in(given), *dicts_in(response.get("output"))):
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: dict[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role", "user")
            messages.append({"role": role, "content": _content(item.get("content"))})
        case "function_call":
            call = _tool_call(item.get("call_id") or item.get("id"), item.get("name"), item.get("arguments"))
            _add_call(messages, call)
        case "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case _:
            pass


def _add_call(messages: list[Message], call: Json) -> None:
    """Add a tool call to the last message if it is an assistant message, else to a new assistant message."""
    # The Responses API has a call as an item of its own; chat has it within the assistant's
    # message.
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}


def _tool_call(call_id: Any, name: Any, arguments: Any) -> Json:
    # Anthropic sends the arguments as an object, OpenAI as JSON text.
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _content(content: Any) -> Json:
    """The content as one text if all of its parts are text, else as a list of chat parts."""
    if not is_list(content):
        return content
    parts = [_chat_part(part) for part in dicts_in(content)]
    known = [part for part in parts if part is not None]
    if all(part["type"] == "text" for part in known):
        return "".join(part["text"] for part in known)
    return known


def _chat_part(part: dict[str, Any]) -> dict[str, Any] | None:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return {"type": "text", "text": as_text(part.get("text"))}
        case "refusal":
            return {"type": "text", "text": as_text(part.get("refusal"))}
        case "input_image":
            # By then a digest or a URL: the record holds no contents of media.
            return {"type": "image_url", "image_url": {"url": part.get("image_url") or part.get("file_id")}}
        case "image":
            source = as_dict(part.get("source"))
            url = source.get("url") or source.get("data") or source.get("file_id")
            return {"type": "image_url", "image_url": {"url": url}}
        case "image_url" | "input_audio" | "file" | "video_url":
            return part
        case _:
            return None


def _anthropic(request: dict[str, Any], response: dict[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if request.get("system"):
        messages.append({"role": "system", "content": _content(request["system"])})
    for message in dicts_in(request.get("messages")):
        messages += _blocks(message.get("role", "user"), message.get("content"))
    if response.get("content"):
        messages += _blocks("assistant", response["content"])
    return messages


def _blocks(role: str, content: Any) -> Iterable[Message]:
    if not is_list(content):
        return [{"role": role, "content": content}]
    blocks = dicts_in(content)
    # Anthropic returns results of tools in a message of the user, which chat splits into messages
    # of the role tool; they come before the text because they answer the calls before it.
    results: list[Message] = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content"))}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        _tool_call(block.get("id"), block.get("name"), block.get("input"))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    rest = [block for block in blocks if _chat_part(block) is not None]
    if not rest and not calls:
        return results
    message: Message = {"role": role, "content": _content(rest) if rest else None}
    return [*results, {**message, "tool_calls": calls} if calls else message]
