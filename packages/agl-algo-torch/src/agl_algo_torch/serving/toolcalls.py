"""Reads tool calls out of generated text, in the notation that the model was trained on.

`hermes` (Qwen and Hermes models, and this project's examples) writes each call as

    <tool_call>
    {"name": "calc", "arguments": {"expression": "7*8"}}
    </tool_call>

If any call is malformed, the whole text stays content, so that the agent and the reward get the model's own text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The text of a response outside of its tool calls (`None` if there is no such text), and the tool calls."""

    content: str | None
    calls: tuple[ParsedToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolParser:
    """A notation of tool calls.

    Attributes:
        parse: Reads a whole response.
        markers: Texts that may start a call; a stream holds back text from a marker on.
        tags: Texts around a call; if they are special tokens of the model, decoded text still contains them.
    """

    parse: Callable[[str], ParsedResponse]
    markers: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _parse_hermes(text: str) -> ParsedResponse:
    """Read calls between tags; other text is content, without the newline that templates put before the first call."""
    head, *parts = text.split(_OPEN)
    calls: list[ParsedToolCall] = []
    rest = ""
    for part in parts:
        body, closed, after = part.partition(_CLOSE)
        call = _read_call(body) if closed else None
        if call is None:
            return ParsedResponse(text)
        calls.append(call)
        rest += after
    if not calls:
        return ParsedResponse(text)
    content = head.removesuffix("\n") + (rest if rest.strip() else "")
    return ParsedResponse(content or None, tuple(calls))


def _read_call(body: str) -> ParsedToolCall | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False))


def tool_parser(name: str) -> ToolParser:
    """Return the parser of a notation by name; raises ConfigError for an unknown name."""
    parsers = {
        "hermes": ToolParser(_parse_hermes, markers=("\n" + _OPEN, _OPEN), tags=(_OPEN, _CLOSE)),
        "none": ToolParser(ParsedResponse),
    }
    if name not in parsers:
        raise ConfigError(f"The tool parser {name!r} is unknown. Use one of: {', '.join(sorted(parsers))}.")
    return parsers[name]
