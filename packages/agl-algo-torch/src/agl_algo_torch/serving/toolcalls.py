"""Reads tool calls out of generated text, in the notation that the model was trained on.

`hermes` (Qwen and Hermes models, and this project's examples) writes each call as

    <tool_call>
    {"name": "calc", "arguments": {"expression": "7*8"}}
    </tool_call>

Text with a malformed call stays content as a whole, so that the agent and the reward see what the model wrote.
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
    """One call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The text of a response outside of its calls (`None` without any), and the calls."""

    content: str | None
    calls: tuple[ParsedToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolParser:
    """A notation of tool calls.

    `parse` reads a whole response. A stream holds text back from a marker on. The tags may be special tokens of the
    model; they stay visible in decoded text.
    """

    parse: Callable[[str], ParsedResponse]
    markers: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _parse_hermes(text: str) -> ParsedResponse:
    """Read calls between tags; text before the first one is content, less the newline that templates put there."""
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
    """Return the parser of a notation; raises ConfigError with the known names."""
    parsers = {
        "hermes": ToolParser(_parse_hermes, markers=("\n" + _OPEN, _OPEN), tags=(_OPEN, _CLOSE)),
        "none": ToolParser(ParsedResponse),
    }
    if name not in parsers:
        raise ConfigError(f"The tool parser {name!r} is unknown. Use one of: {', '.join(sorted(parsers))}.")
    return parsers[name]
