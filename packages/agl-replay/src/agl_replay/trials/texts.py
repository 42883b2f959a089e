"""Resources as texts that a person edits, and the checks that an edited text must pass before it runs.

A prompt is its template, a string is itself, and any other value is JSON. A prompt of several messages stays one, and
every template keeps its placeholders: the agent fills them in.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import msgspec

from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, Resource
from agl_run import Messages
from agl_run.engine import value_for_agent

TextResource = PromptTemplate | JsonResource
"""A resource that has a text; models and weights have none."""

_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def text_of(resource: TextResource) -> str:
    """Return the text that a person edits: a template, a string, or indented JSON."""
    if isinstance(resource, PromptTemplate):
        return resource.template
    if isinstance(resource.value, str):
        return resource.value
    return msgspec.json.format(msgspec.json.encode(resource.value), indent=2).decode()


def with_text(resource: TextResource, text: str) -> TextResource:
    """Return the resource with another text.

    Raises:
        ConfigError: The text is empty, is no JSON where the resource is a value, is of another kind, or has broken
            placeholders or other ones than the resource has; names them.
    """
    if not text.strip():
        raise ConfigError("it is empty; write the whole text of the resource")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"it is no UTF-8: {error.reason} at character {error.start}; save it as UTF-8") from None
    if isinstance(resource, PromptTemplate):
        made: TextResource = PromptTemplate(template=text, engine=resource.engine)
    else:
        made = JsonResource(value=_value(resource.value, text))
    if isinstance(value_for_agent(resource), Messages) and not isinstance(value_for_agent(made), Messages):
        raise ConfigError(
            'it is no list of messages, and the resource is a prompt of messages; write [{"role": "system", "content": '
            '"..."}, ...] with the roles system, developer, user and assistant'
        )
    lost = sorted(_kept(resource) - placeholders(made))
    if lost:
        raise ConfigError(f"it lacks the placeholders {', '.join(lost)}, which the agent fills in; add them")
    return made


def placeholders(resource: Resource) -> frozenset[str]:
    """Return the placeholders of a prompt as they are written; none for any other value.

    Raises:
        ConfigError: The template cannot be parsed, or is one of jinja, which is not installed.
    """
    if isinstance(resource, PromptTemplate) and resource.engine == "jinja":
        return frozenset(f"{{{{ {name} }}}}" for name in _jinja_names(resource.template))
    return frozenset(f"{{{name}}}" for text in _templates(resource) for name in _names(text))


def unknown_placeholders(new: TextResource, old: TextResource, *, keys: Iterable[str]) -> list[str]:
    """Return the placeholders that a new text has beyond the old one, and that no key of the tasks is called."""
    known = set(keys)
    return sorted(each for each in placeholders(new) - _kept(old) if each.strip("{} ") not in known)


def _kept(old: TextResource) -> frozenset[str]:
    """Return the placeholders of the text before, none if it is broken, so that an edit can mend it."""
    try:
        return placeholders(old)
    except ConfigError:
        return frozenset()


def _value(old: Json, text: str) -> Json:
    """Return a value from its text; a string is its own text."""
    if isinstance(old, str):
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"it is no JSON, which the resource is: {error}") from None
    if type(value) is not type(old) and not {type(old), type(value)} <= {int, float}:
        raise ConfigError(f"it is {_kind(value)}, and the resource is {_kind(old)}; keep the kind of the value")
    return value


def _kind(value: Any) -> str:
    return (
        "null"
        if value is None
        else next((words for kind, words in _KINDS.items() if isinstance(value, kind)), "a number")
    )


def _templates(resource: Resource) -> list[str]:
    if isinstance(resource, PromptTemplate):
        return [resource.template] if resource.engine == "f-string" else []
    value = value_for_agent(resource)
    return [message["content"] for message in value] if isinstance(value, Messages) else []


def _names(template: str) -> frozenset[str]:
    try:
        names = PromptTemplate(template=template).fields
    except ValueError as error:
        raise ConfigError(f"its braces are broken: {error}; write literal braces as {{{{ and }}}}") from None
    wrong = sorted(name for name in names if not name.isidentifier())
    if wrong:
        raise ConfigError(f"it has {{{wrong[0][:40]}}}, which is no placeholder; write literal braces as {{{{ and }}}}")
    return names


def _jinja_names(template: str) -> set[str]:
    try:
        sandbox, meta = (import_module(f"jinja2.{part}") for part in ("sandbox", "meta"))
    except ImportError as error:
        raise ConfigError("a jinja prompt template needs jinja2; run: pip install jinja2") from error
    jinja2: Any = import_module("jinja2")
    try:
        return meta.find_undeclared_variables(sandbox.SandboxedEnvironment().parse(template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"its line {error.lineno} is no jinja: {error.message}") from None
