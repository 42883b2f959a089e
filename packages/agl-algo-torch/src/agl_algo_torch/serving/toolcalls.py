"""Reads reasoning and tool calls out of generated text, in the notation that the model's chat template writes.

The notations have the names that vLLM gives to its parsers. `read_format` chooses one by rendering: the chat template
writes a tool call, and the parser that reads the same call back is the one for the model. The reasoning's tags come
from a rendering too. `tool_parser` may also name an object of another package, as `"package.module:PARSER"`.

If any call is malformed, the whole text stays content, so that the agent and the reward get the model's own text.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from agl.errors import ConfigError
from agl_algo_torch.serving.codec import REASONING, render_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Tools = Sequence[dict[str, Any]]
    """Tools as in a request's `tools`."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One tool call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A response split into text (`None` if there is no text outside of tool calls), tool calls and reasoning."""

    content: str | None
    calls: tuple[ParsedToolCall, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ToolParser:
    """A notation of tool calls.

    Attributes:
        parse: Splits a response without its reasoning into text and calls of these tools; a tool's schema gives the
            types of arguments that are written as bare text.
        markers: Texts that may start a call; a stream holds back text from a marker on.
        tags: Texts around a call; if they are special tokens of the model, decoded text still contains them.
        is_whole: Whether `parse` also reads the reasoning, and responses to requests without tools.
    """

    parse: Callable[[str, Tools], ParsedResponse]
    markers: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The notation in which a model writes reasoning and tool calls.

    Attributes:
        name: Name of the notation of tool calls.
        parser: The notation of tool calls.
        thinking: The texts before and after the reasoning; None if the chat template renders no reasoning.
        refusal: Why requests with tools are refused; `""` if they are not.
    """

    name: str
    parser: ToolParser
    thinking: tuple[str, str] | None = None
    refusal: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that stay in decoded responses even if they are special tokens."""
        return (*self.parser.tags, *(self.thinking or ()))

    def opens_thinking(self, prompt: str) -> bool:
        """Return true if a prompt ends with the text that opens the reasoning."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[0])

    def split(self, text: str, *, is_open: bool) -> tuple[str, int]:
        """Return the reasoning in a growing response, and the position at which the content begins.

        The position is -1 while it is not known. `is_open` says that the prompt ends within the reasoning.
        """
        if self.thinking is None:
            return "", 0
        before, after = self.thinking
        body = text if is_open else text.lstrip()
        if not is_open and not body.startswith(before):
            return "", -1 if before.startswith(body) else 0
        thought, _, rest = body.removeprefix(before).partition(after)
        content = rest.lstrip("\n")
        return thought.strip("\n"), len(text) - len(content) if content else -1

    def read(self, text: str, *, tools: Tools, is_open: bool) -> ParsedResponse:
        """Split a finished response into reasoning, content and tool calls."""
        thought, start = self.split(text, is_open=is_open)
        rest = text[start:] if start >= 0 else "" if thought or is_open else text
        found = self.parser.parse(rest, tools) if tools or self.parser.is_whole else ParsedResponse(rest)
        return replace(found, content=found.content or None, reasoning=found.reasoning or thought or None)


_PROBE = "agl-probe"
_QUESTION = {"role": "user", "content": "question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "agl_probe_tool",
        "description": "looks up",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "string", "description": "a"},
                "n": {"type": "integer", "description": "b"},
            },
            "required": ["where"],
        },
    },
}
_ARGUMENTS = {"where": _PROBE, "n": 3}
_CALL = {"id": "agl000000", "type": "function", "function": {"name": "agl_probe_tool", "arguments": _ARGUMENTS}}


def read_format(tokenizer: Any, *, tool_parser: str = "auto", stop_texts: Sequence[str] = ()) -> AnswerFormat:
    """Return how the model of a tokenizer writes answers, by rendering probes with its chat template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        tool_parser: Name of a notation, `auto` to choose one, `none` to leave every text as it is, or
            `"package.module:PARSER"` for a `ToolParser` elsewhere.
        stop_texts: Texts of the tokens that end a response.

    Raises:
        ConfigError: The parser is unknown.
    """
    if tool_parser == "none":
        return AnswerFormat(name="none", parser=_PARSERS["none"])
    names = list(_PARSERS) if tool_parser == "auto" else [tool_parser]
    parsers = {name: find_parser(name) for name in names}
    shown, asked = (_rendered(tokenizer, [_QUESTION], tools=tools, is_prompt=True) for tools in ([_TOOL], None))
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    answer = _after(_rendered(tokenizer, [_QUESTION, called], tools=[_TOOL], is_prompt=False), shown)
    for text in stop_texts:
        answer = answer.rstrip().removesuffix(text)
    thinking = _thinking(tokenizer, asked)
    wanted = (ParsedToolCall("agl_probe_tool", json.dumps(_ARGUMENTS)),)
    for name, parser in parsers.items():
        formed = AnswerFormat(name=name, parser=parser, thinking=None if parser.is_whole else thinking)
        if any(formed.read(answer, tools=[_TOOL], is_open=is_open).calls == wanted for is_open in (False, True)):
            break
    else:
        name, parser = ("none", _PARSERS["none"]) if tool_parser == "auto" else next(iter(parsers.items()))
        formed = AnswerFormat(name=name, parser=parser, thinking=thinking)
        if tool_parser == "auto":
            formed = replace(formed, refusal="writes tool calls in a form that no parser reads back")
    if not shown:  # the template refuses tools, or this conversation; its own words are clearer
        return replace(formed, refusal="")
    return replace(formed, refusal="does not show tools to the model") if shown == asked else formed


def find_parser(name: str) -> ToolParser:
    """Return the parser of a notation, by name or by `"module:ATTRIBUTE"`; raises ConfigError for an unknown one."""
    module, is_reference, attribute = name.partition(":")
    if is_reference:
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"The tool parser {name!r} cannot be imported: {error}.") from error
        if not isinstance(found, ToolParser):
            raise ConfigError(f"The tool parser {name!r} is a {type(found).__name__}. Name a ToolParser.")
        return found
    if name not in _PARSERS:
        raise ConfigError(
            f"The tool parser {name!r} is unknown. Use one of: auto, {', '.join(sorted(_PARSERS))}, or "
            "package.module:PARSER for one of another package."
        )
    return _PARSERS[name]


def _rendered(tokenizer: Any, messages: Sequence[Any], *, tools: Tools | None, is_prompt: bool) -> str:
    """Return a conversation as the chat template renders it; `""` if the template refuses it."""
    try:
        return render_chat(tokenizer, messages, tools=tools, add_generation_prompt=is_prompt)
    except (TemplateError, TypeError, ValueError, KeyError):
        return ""


def _after(text: str, prompt: str) -> str:
    """Return the part of `text` after the prefix that it shares with `prompt`: what a rendered answer adds."""
    same = next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt)))
    return text[same:]


def _thinking(tokenizer: Any, prompt: str) -> tuple[str, str] | None:
    """Return the texts before and after an answer's reasoning; None if the chat template renders no reasoning."""
    message = {"role": "assistant", "content": "agl-content", **dict.fromkeys(REASONING, _PROBE)}
    text = _rendered(tokenizer, [_QUESTION, message], tools=None, is_prompt=False)
    head, found, rest = text.partition(_PROBE)
    if found and "agl-content" in rest:
        before = _after(head, prompt).strip() or head.rstrip().rpartition("\n")[2]
        after = rest.partition("agl-content")[0].strip()
        return (before, after) if before and after else None  # without both, the reasoning cannot be told apart
    # Templates that drop the reasoning of earlier answers name the tag by which they cut it off.
    return ("<think>", "</think>") if "</think>" in str(tokenizer.chat_template) else None


def _tagged(
    before: str, after: str, read: Callable[[str, Tools], ParsedToolCall | None], *, around: Sequence[str] = ()
) -> ToolParser:
    """Return a parser of calls between two tags; other text is content, without the texts `around` the calls."""

    def parse(text: str, tools: Tools) -> ParsedResponse:
        head, *parts = text.split(before)
        calls: list[ParsedToolCall] = []
        rest = ""
        for part in parts:
            body, closed, behind = part.partition(after)
            call = read(body, tools) if closed else None
            if call is None:
                return ParsedResponse(text)
            calls.append(call)
            rest += behind
        if not calls:
            return ParsedResponse(text)
        for each in around:
            head, rest = head.replace(each, ""), rest.replace(each, "")
        # Templates put a newline before the first call.
        content = head.removesuffix("\n") + (rest if rest.strip() else "")
        return ParsedResponse(content or None, tuple(calls))

    first = around[0] if around else before
    return ToolParser(parse, markers=("\n" + first, first), tags=(before, after, *around))


def _call(name: object, arguments: object) -> ParsedToolCall | None:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        return ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False))
    except RecursionError:  # writing can need a little more of the stack than reading did
        return None


def _json(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fields(value: Any) -> dict[str, Any]:
    """Return a JSON object as it is, and no fields for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _schemas(tools: Tools) -> dict[str, Any]:
    """Return the schema of each tool's parameters by the tool's name."""
    functions = [_fields(tool.get("function")) for tool in tools]
    return {function.get("name", ""): function.get("parameters") for function in functions}


def _json_call(value: Any) -> ParsedToolCall | None:
    """Read `{"name": ..., "arguments": {...}}`; Llama writes `parameters`."""
    fields = _fields(value)
    return _call(fields.get("name"), fields.get("arguments", fields.get("parameters", {})))


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> ParsedToolCall | None:
    """Return a call with arguments given as bare texts.

    A text is parsed as JSON if the tool's schema gives the argument a type, or types, other than string.
    """
    properties = _fields(_fields(_schemas(tools).get(name)).get("properties"))
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        kinds: Any = _fields(properties[key]).get("type") if key in properties else "string"
        value = None if "string" in (kinds if isinstance(kinds, list) else [kinds]) else _json(text)
        arguments[key] = text if value is None and text.strip() != "null" else value
    return _call(name, arguments)


def _xml_call(body: str, tools: Tools) -> ParsedToolCall | None:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>`, with line breaks between the tags."""
    found = re.fullmatch(r"\s*<function=([^>]+)>(.*?)</function>\s*", body, re.DOTALL)
    pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL) if found else []
    return _typed_call(found[1], pairs, tools) if found else None


def _glm_call(body: str, tools: Tools) -> ParsedToolCall | None:
    """Read `NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument."""
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    return _typed_call(body.partition("<arg_key>")[0].strip(), pairs, tools)


def _deepseek(words: str) -> str:
    """Return a special token of DeepSeek, with full-width bars, and lower-eighth blocks in place of spaces."""
    name = f"tool {words}".replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    return f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>"


def _deepseek_call(body: str, _: Tools) -> ParsedToolCall | None:
    """Read `function`, a separator, NAME and a block of JSON (V3, R1), or NAME, the separator and JSON (V3.1)."""
    name, rest = body.split(_deepseek("sep"), 1) if _deepseek("sep") in body else (body, "")
    if name == "function":
        name, rest = rest.split("\n", 1) if "\n" in rest else (rest, "")
        rest = rest.strip().removeprefix("```json").removesuffix("```")
    return _call(name, _json(rest))


def _parse_llama(text: str, tools: Tools) -> ParsedResponse:
    """Read a response that is one or more JSON objects, separated by `;`.

    No tag tells a call from an answer in JSON, so each object must name a tool and have arguments.
    """
    body = text.strip().removeprefix("<|python_tag|>")
    values: list[Any] = []
    decoder = json.JSONDecoder()
    try:
        while body:
            value, end = decoder.raw_decode(body)
            values.append(value)
            body = body[end:].lstrip("; \n")
    except (ValueError, RecursionError):
        return ParsedResponse(text)
    found, names = [_fields(value) for value in values], list(_schemas(tools))
    if all(one.get("name") in names and ("arguments" in one or "parameters" in one) for one in found):
        return _all_or_text(text, None, map(_json_call, found))
    return ParsedResponse(text)


def _parse_mistral(text: str, _: Tools) -> ParsedResponse:
    """Read `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call (from v11 on)."""
    head, *parts = text.split("[TOOL_CALLS]")
    if len(parts) == 1 and "[ARGS]" not in parts[0]:
        values = _json(parts[0])
        return _all_or_text(
            text, head, map(_json_call, cast("list[Any]", values) if isinstance(values, list) else [None])
        )
    found = (part.partition("[ARGS]") for part in parts)
    return _all_or_text(text, head, (_call(name.partition("[CALL_ID]")[0], _json(args)) for name, _, args in found))


def _parse_harmony(text: str, _: Tools) -> ParsedResponse:
    """Read gpt-oss messages: `analysis` is reasoning, messages to `functions.NAME` are calls, the rest content."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ParsedToolCall | None] = []
    for message in re.split(r"<\|(?:end|call|return)\|>(?:<\|start\|>assistant)?", text):
        head, has_body, body = message.partition("<|message|>")
        recipient = re.search(r"to=functions\.([\w.-]+)", head)
        if not has_body:
            content.append(head)
        elif recipient:
            calls.append(_call(recipient[1], _json(body)))
        else:
            (reasoning if "analysis" in head else content).append(body)
    found = _all_or_text(text, "".join(content), calls)
    # A text before a call counts as reasoning: the template takes only one of both back.
    if found.calls:
        return replace(found, content=None, reasoning="\n".join([*reasoning, *filter(None, content)]))
    return replace(found, reasoning="\n".join(reasoning) or None)


def _all_or_text(text: str, content: str | None, calls: Iterable[ParsedToolCall | None]) -> ParsedResponse:
    """Return content and calls; if a call is malformed, the whole text as content."""
    found = tuple(calls)
    whole = tuple(call for call in found if call is not None)
    if len(whole) < len(found):
        return ParsedResponse(text)
    return ParsedResponse(content or None, whole)


_PARSERS = {
    "hermes": _tagged("<tool_call>", "</tool_call>", lambda body, _: _json_call(_json(body))),
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>", _xml_call),
    "glm45": _tagged("<tool_call>", "</tool_call>", _glm_call),
    "deepseek_v3": _tagged(
        _deepseek("call begin"),
        _deepseek("call end"),
        _deepseek_call,
        around=(_deepseek("calls begin"), _deepseek("calls end")),
    ),
    "llama3_json": ToolParser(_parse_llama, markers=('{"', "<|python_tag|>"), tags=("<|python_tag|>",)),
    "mistral": ToolParser(_parse_mistral, markers=("[TOOL_CALLS]",), tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "openai": ToolParser(
        _parse_harmony,
        markers=("<|channel|>", " to=", "<|message|>"),
        tags=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        is_whole=True,
    ),
    "none": ToolParser(lambda text, _: ParsedResponse(text)),
}
