"""Langfuse's attributes, as its SDKs from version 3 send them by OTLP, in the names of the GenAI conventions."""

from agl import semconv
from agl.schemas import Json
from agl_data.importing.readers.genai import TOOLS
from agl_data.importing.readers.payloads import answer_of, messages_of, parsed, token_counts
from agl_data.importing.traces import agent_attributes, tool_attributes
from agl_data.importing.values import as_dict, as_text

_TYPE, _INPUT, _OUTPUT = "langfuse.observation.type", "langfuse.observation.input", "langfuse.observation.output"
CONTENT = (_INPUT, _OUTPUT)
"""Names of attributes that hold what a call's own fields hold."""

COUNTS = (("prompt_tokens", "completion_tokens"), ("input", "output"), ("input_tokens", "output_tokens"))
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")


def as_genai(attributes: dict[str, Json], name: str) -> dict[str, Json]:
    """Return a span's attributes with those of the GenAI conventions that Langfuse's mean; others as they are.

    ``name`` is the span's, which names an agent or a tool.
    """
    kind = as_text(attributes.get(_TYPE)).lower()
    if not kind or semconv.OPERATION in attributes:
        return attributes
    found: dict[str, Json] = {}
    match kind:
        case "generation":
            found = _call(attributes)
        case "agent":
            found = agent_attributes(name)
        case "tool":
            found = tool_attributes(name, attributes.get(_INPUT), attributes.get(_OUTPUT))
        case _:
            pass
    return {**attributes, **{key: value for key, value in found.items() if value not in (None, "", [])}}


def _call(attributes: dict[str, Json]) -> dict[str, Json]:
    asked, settings = (
        parsed(attributes.get(_INPUT)),
        as_dict(parsed(attributes.get("langfuse.observation.model.parameters"))),
    )
    answer = answer_of(attributes.get(_OUTPUT))
    counts = token_counts(attributes.get("langfuse.observation.usage_details"), *COUNTS)
    return {
        semconv.OPERATION: semconv.OP_CHAT,
        semconv.REQUEST_MODEL: attributes.get("langfuse.observation.model.name"),
        semconv.INPUT_MESSAGES: messages_of(asked),
        semconv.OUTPUT_MESSAGES: [answer] if answer else None,
        semconv.INPUT_TOKENS: counts.get("prompt_tokens"),
        semconv.OUTPUT_TOKENS: counts.get("completion_tokens"),
        TOOLS: as_dict(asked).get("tools"),
        **{f"gen_ai.request.{key}": value for key in _SAMPLING if isinstance(value := settings.get(key), int | float)},
    }
