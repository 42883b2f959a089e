"""Finds the text to judge in an attempt: an answer, the agent's output, an emitted object or a tool call.

Every emitter of this package that reads a text has an argument ``source`` with one of these forms:

- ``answer``: the last complete model answer that has text;
- ``answer:AGENT``: the last such answer of an agent, node or role whose whole name the regular expression matches;
- ``conversation``: every message of the last complete model call, with its role and tool calls;
- ``output`` or ``output:KEY``: the agent's return value, or one key of it;
- ``object:NAME`` or ``object:NAME:KEY``: the last ``agl.emit_object(value, name=NAME)``, or one key of it;
- ``tool:NAME:ARGUMENT``: an argument of the last call of a tool.

If an attempt does not have the source, the text is empty. A value that is not text is converted to JSON.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec

from agl import semconv
from agl.dialects import call_messages
from agl.episodes import Enclosing, chronological, final_text, is_answered
from agl.errors import ConfigError
from agl.schemas import Json, Span

TextOf = Callable[[Sequence[Span]], str]
"""A function that finds the text in an attempt's spans."""

_FORMS = "answer, answer:AGENT, conversation, output, output:KEY, object:NAME, object:NAME:KEY or tool:NAME:ARGUMENT"


def text_source(source: str) -> TextOf:
    """Return the function that finds the text; raises :class:`ConfigError` if ``source`` has none of the forms."""
    match source.split(":"):
        case ["answer"]:
            return final_text
        case ["answer", agent]:
            return _answer_of(_pattern(agent))
        case ["conversation"]:
            return _conversation
        case ["output"]:
            return lambda spans: as_text(_output(spans))
        case ["output", key]:
            return lambda spans: as_text(_member(_output(spans), key))
        case ["object", name]:
            return lambda spans: as_text(_object(spans, name))
        case ["object", name, key]:
            return lambda spans: as_text(_member(_object(spans, name), key))
        case ["tool", name, argument]:
            return lambda spans: as_text(_member(next(_arguments(spans, name), None), argument))
        case _:
            raise ConfigError(f"a reward got source = {source!r}; write {_FORMS}")


def unfenced(text: str, *languages: str) -> str:
    """Return the last fenced block without a language or with one of ``languages``, or else the whole text.

    White space around the returned text is removed.
    """
    blocks = re.findall(r"```[ \t]*(\w*)[ \t]*\r?\n(.*?)```", text, re.DOTALL)
    fitting = [body for language, body in blocks if language.lower() in ("", *languages)]
    return (fitting[-1] if fitting else text).strip()


def task_fields(task: Json) -> dict[str, Json]:
    """Return the top-level keys of a task with their values; an empty dict if the task is not an object."""
    return cast("dict[str, Json]", task) if isinstance(task, dict) else {}


def as_text(value: Json) -> str:
    """Return text unchanged, ``None`` as an empty text, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"the agent {text!r} in a reward's source is not a regular expression: {error}; correct it"
        ) from error


def _answer_of(agent: re.Pattern[str]) -> TextOf:
    def text(spans: Sequence[Span]) -> str:
        enclosing = Enclosing(spans)
        calls = [span for span in spans if span.call is not None]
        return final_text([span for span in calls if any(map(agent.fullmatch, enclosing.who(span).named))])

    return text


def _conversation(spans: Sequence[Span]) -> str:
    ordered = (span for span in reversed(chronological(spans).spans) if span.call is not None and not span.is_late)
    calls = (span.call for span in ordered if span.call is not None and is_answered(span.call))
    last = next((call for call in calls if call.dialect != "embeddings"), None)
    messages: list[Any] = [] if last is None else call_messages(last)
    return "".join(f"[{message.get('role')}]\n{_said(message)}\n" for message in messages)


def _said(message: Any) -> str:
    parts = (message.get("content"), message.get("tool_calls"))
    return "\n".join(as_text(part) for part in parts if part)


def _output(spans: Sequence[Span]) -> Json:
    return next((span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes), None)


def _object(spans: Sequence[Span], name: str) -> Json:
    named = (span for span in reversed(chronological(spans).spans) if span.name == f"object {name}")
    return next((span.attributes.get(semconv.OBJECT) for span in named), None)


def _arguments(spans: Sequence[Span], tool: str) -> Iterator[Json]:
    """Yield the arguments of a tool's calls, latest first: first those that models requested, then those that ran."""
    ordered = [span for span in reversed(chronological(spans).spans) if not span.is_late]
    for span in ordered:
        if span.call is None or not is_answered(span.call) or span.call.dialect == "embeddings":
            continue
        last = call_messages(span.call)[-1:]
        calls: list[Any] = last[0].get("tool_calls") or [] if last and last[0].get("role") == "assistant" else []
        functions: list[Any] = [call.get("function") or {} for call in calls]
        for function in reversed(functions):
            if function.get("name") == tool:
                yield _decoded(function.get("arguments"))
    for span in ordered:
        if span.attributes.get(semconv.TOOL_NAME) == tool and semconv.TOOL_ARGUMENTS in span.attributes:
            yield _decoded(span.attributes[semconv.TOOL_ARGUMENTS])


def _decoded(arguments: Any) -> Json:
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return None


def _member(value: Json, key: str) -> Json:
    """Return the value of ``key`` in an object, which may be given as JSON text; ``None`` if there is no such key."""
    found = _decoded(value)
    return cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
