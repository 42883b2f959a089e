"""OpenInference's attributes, as Phoenix and its instrumentations write them, in the names of the GenAI conventions.

Lists are flat there: ``llm.input_messages.0.message.role``.
"""

import json
from typing import Any

from agl import semconv
from agl.schemas import Json
from agl_data.importing.readers.genai import TOOLS
from agl_data.importing.values import as_dict, as_text, first

_KIND = "openinference.span.kind"
_OPERATIONS = {
    "LLM": semconv.OP_CHAT,
    "AGENT": semconv.OP_INVOKE_AGENT,
    "TOOL": semconv.OP_EXECUTE_TOOL,
    "EMBEDDING": semconv.OP_EMBEDDINGS,
}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")


def as_genai(attributes: dict[str, Json], name: str) -> dict[str, Json]:
    """Return a span's attributes with those of the GenAI conventions that OpenInference's mean; others as they are.

    ``name`` is the span's, which names an agent or a tool that has no other name.
    """
    kind = as_text(attributes.get(_KIND)).upper()
    if not kind or semconv.OPERATION in attributes:
        return attributes
    found: dict[str, Json] = {semconv.OPERATION: _OPERATIONS.get(kind)}
    match kind:
        case "LLM":
            found |= _call(attributes)
        case "AGENT":
            found[semconv.AGENT_NAME] = first((attributes.get("agent.name"), name))
        case "TOOL":
            found[semconv.TOOL_NAME] = first((attributes.get("tool.name"), name))
            found[semconv.TOOL_CALL_ID] = attributes.get("tool_call.id")
            found[semconv.TOOL_ARGUMENTS] = attributes.get("input.value")
            found[semconv.TOOL_RESULT] = attributes.get("output.value")
        case _:
            pass
    return {**attributes, **{key: value for key, value in found.items() if value not in (None, "", [])}}


def _call(attributes: dict[str, Json]) -> dict[str, Json]:
    settings = _parsed(attributes.get("llm.invocation_parameters"))
    tools = [_parsed(as_dict(tool.get("tool")).get("json_schema")) for tool in _listed(attributes, "llm.tools.")]
    return {
        semconv.REQUEST_MODEL: attributes.get("llm.model_name"),
        semconv.INPUT_MESSAGES: _messages(attributes, "llm.input_messages."),
        semconv.OUTPUT_MESSAGES: _messages(attributes, "llm.output_messages."),
        semconv.INPUT_TOKENS: attributes.get("llm.token_count.prompt"),
        semconv.OUTPUT_TOKENS: attributes.get("llm.token_count.completion"),
        semconv.FINISH_REASONS: [attributes["llm.finish_reason"]] if attributes.get("llm.finish_reason") else None,
        TOOLS: [tool for tool in tools if tool],
        **{f"gen_ai.request.{key}": settings.get(key) for key in _SAMPLING},
    }


def _messages(attributes: dict[str, Json], prefix: str) -> list[dict[str, Json]]:
    return [_message(as_dict(each.get("message"))) for each in _listed(attributes, prefix)]


def _message(found: dict[str, Any]) -> dict[str, Json]:
    message: dict[str, Json] = {"role": as_text(found.get("role")) or "user", "content": found.get("content")}
    parts = [as_dict(part.get("message_content")) for part in _in_order(found.get("contents"))]
    if parts and not message["content"]:
        texts = [as_text(part.get("text")) for part in parts]
        images = [as_text(as_dict(as_dict(part.get("image")).get("image")).get("url")) for part in parts]
        message["content"] = [
            {"type": "image_url", "image_url": {"url": image}} if image else {"type": "text", "text": text}
            for text, image in zip(texts, images, strict=True)
        ]
        if not any(images):
            message["content"] = "".join(texts)
    calls = [as_dict(call.get("tool_call")) for call in _in_order(found.get("tool_calls"))]
    if calls:
        message["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": as_dict(call.get("function"))} for call in calls
        ]
    for key in ("tool_call_id", "name"):
        if found.get(key):
            message[key] = found[key]
    return message


def _listed(attributes: dict[str, Json], prefix: str) -> list[dict[str, Any]]:
    """Return the items of a flat list, in order of their numbers."""
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith(prefix):
            _plant(tree, name.removeprefix(prefix).split("."), value)
    return _in_order(tree)


def _plant(tree: dict[str, Any], path: list[str], value: Json) -> None:
    for key in path[:-1]:
        below = tree.get(key)
        if not isinstance(below, dict):
            below = tree[key] = {}
        tree = below  # pyright: ignore[reportUnknownVariableType]  # a tree of any depth
    tree[path[-1]] = value


def _in_order(tree: Json) -> list[dict[str, Any]]:
    items = as_dict(tree)
    return [as_dict(items[key]) for key in sorted((key for key in items if key.isdecimal()), key=int)]


def _parsed(text: Json) -> dict[str, Any]:
    try:
        return as_dict(json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return as_dict(text)
