"""Translates span attributes of OpenInference and Langfuse to OpenTelemetry's GenAI conventions.

Phoenix and its instrumentations write attributes of OpenInference, which flattens lists into names such as
``llm.input_messages.0.message.role``. Langfuse's SDKs from version 3 on send Langfuse's own attributes by OTLP.
"""

from typing import Any

from agl import semconv
from agl.schemas import Json
from agl_data.importing.readers.genai import TOOLS
from agl_data.importing.readers.payloads import FLOATS, WHOLE, answer_of, chat_usage, messages_of, parsed
from agl_data.importing.traces import agent_attributes, tool_attributes
from agl_data.importing.values import as_dict, as_text, first

_TYPE, _INPUT, _OUTPUT = "langfuse.observation.type", "langfuse.observation.input", "langfuse.observation.output"
LANGFUSE_CONTENT = (_INPUT, _OUTPUT)
"""Prefixes of Langfuse attributes that are dropped, because the fields of the call have their contents."""

_KIND = "openinference.span.kind"
_OPERATIONS = {
    "LLM": semconv.OP_CHAT,
    "AGENT": semconv.OP_INVOKE_AGENT,
    "TOOL": semconv.OP_EXECUTE_TOOL,
    "EMBEDDING": semconv.OP_EMBEDDINGS,
}


def as_genai(attributes: dict[str, Json], name: str) -> dict[str, Json]:
    """Return a span's attributes, with the equivalent attributes of the GenAI conventions added.

    Attributes that already follow the conventions are returned unchanged. ``name`` is the span's name; an agent or tool
    without another name gets it.
    """
    if semconv.OPERATION in attributes:
        return attributes
    found = _openinference(attributes, name) or _langfuse(attributes, name)
    return {**attributes, **{key: value for key, value in found.items() if value not in (None, "", [])}}


def _openinference(attributes: dict[str, Json], name: str) -> dict[str, Json]:
    kind = as_text(attributes.get(_KIND)).upper()
    found: dict[str, Json] = {semconv.OPERATION: _OPERATIONS[kind]} if kind in _OPERATIONS else {}
    match kind:
        case "LLM":
            return {**found, **_openinference_call(attributes)}
        case "AGENT":
            return agent_attributes(as_text(first((attributes.get("agent.name"), name))))
        case "TOOL":
            title, call_id = first((attributes.get("tool.name"), name)), attributes.get("tool_call.id")
            values = attributes.get("input.value"), attributes.get("output.value")
            return tool_attributes(as_text(title), *values, call_id=as_text(call_id))
        case _:
            return found


def _langfuse(attributes: dict[str, Json], name: str) -> dict[str, Json]:
    match as_text(attributes.get(_TYPE)).lower():
        case "generation":
            return _langfuse_call(attributes)
        case "agent":
            return agent_attributes(name)
        case "tool":
            return tool_attributes(name, attributes.get(_INPUT), attributes.get(_OUTPUT))
        case _:
            return {}


def _openinference_call(attributes: dict[str, Json]) -> dict[str, Json]:
    settings = as_dict(parsed(attributes.get("llm.invocation_parameters")))
    tools = [
        as_dict(parsed(as_dict(tool.get("tool")).get("json_schema"))) for tool in _listed(attributes, "llm.tools.")
    ]
    return {
        semconv.REQUEST_MODEL: attributes.get("llm.model_name"),
        semconv.INPUT_MESSAGES: _messages(attributes, "llm.input_messages."),
        semconv.OUTPUT_MESSAGES: _messages(attributes, "llm.output_messages."),
        semconv.INPUT_TOKENS: attributes.get("llm.token_count.prompt"),
        semconv.OUTPUT_TOKENS: attributes.get("llm.token_count.completion"),
        semconv.FINISH_REASONS: [attributes["llm.finish_reason"]] if attributes.get("llm.finish_reason") else None,
        TOOLS: [tool for tool in tools if tool],
        **{f"gen_ai.request.{key}": settings.get(key) for key in (*FLOATS, *WHOLE)},
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
    """Rebuild the list that the attributes under a prefix flatten, in order of the item numbers."""
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


def _langfuse_call(attributes: dict[str, Json]) -> dict[str, Json]:
    asked = parsed(attributes.get(_INPUT))
    settings = as_dict(parsed(attributes.get("langfuse.observation.model.parameters")))
    answer = answer_of(attributes.get(_OUTPUT))
    counts = chat_usage(attributes.get("langfuse.observation.usage_details"))
    return {
        semconv.OPERATION: semconv.OP_CHAT,
        semconv.REQUEST_MODEL: attributes.get("langfuse.observation.model.name"),
        semconv.INPUT_MESSAGES: messages_of(asked),
        semconv.OUTPUT_MESSAGES: [answer] if answer else None,
        semconv.INPUT_TOKENS: counts.get("prompt_tokens"),
        semconv.OUTPUT_TOKENS: counts.get("completion_tokens"),
        TOOLS: as_dict(asked).get("tools"),
        **{
            f"gen_ai.request.{key}": value
            for key in (*FLOATS, *WHOLE)
            if isinstance(value := settings.get(key), int | float)
        },
    }
