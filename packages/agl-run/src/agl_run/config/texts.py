"""Reads and replaces the text of a prompt or of a JSON value; a new text keeps the placeholders of the old one."""

from collections.abc import Collection
from importlib import import_module
from typing import Any

import msgspec

from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, Resource
from agl_run.messages import Messages, value_for_agent

TextResource = PromptTemplate | JsonResource
"""A resource that has a text, unlike models and weights."""

_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    type(None): "null",
}


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
        ConfigError: The text is empty or not UTF-8; or the resource is a value, and the text is not JSON of the same
            type; or placeholders are broken, or those of the resource are missing. The message names them.
    """
    if not text.strip():
        raise ConfigError("it is empty; write the whole text of the resource")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"it is not UTF-8: {error.reason} at character {error.start}; save it as UTF-8") from None
    if isinstance(resource, PromptTemplate):
        made: TextResource = PromptTemplate(template=text, engine=resource.engine)
    else:
        made = JsonResource(value=_value(resource.value, text))
    if isinstance(value_for_agent(resource), Messages) and not isinstance(value_for_agent(made), Messages):
        raise ConfigError(
            'it is not a list of messages, and the resource is a prompt of messages; write [{"role": "system", '
            '"content": "..."}, ...] with the roles system, developer, user and assistant'
        )
    lost = sorted(_kept(resource) - placeholders(made))
    if lost:
        raise ConfigError(f"it lacks the placeholders {', '.join(lost)}, which the agent fills in; add them")
    return made


def placeholders(resource: Resource) -> frozenset[str]:
    """Return the placeholders of a prompt as they are written, such as ``{name}``; empty for any other value.

    Raises:
        ConfigError: The template cannot be parsed, or it is a jinja template and jinja2 is not installed.
    """
    if isinstance(resource, PromptTemplate) and resource.engine == "jinja":
        return frozenset(f"{{{{ {name} }}}}" for name in _jinja_names(resource.template))
    return frozenset(f"{{{name}}}" for text in _templates(resource) for name in _names(text))


def unknown_placeholders(new: TextResource, old: TextResource, *, keys: Collection[str]) -> list[str]:
    """Return the placeholders that ``new`` has and ``old`` lacks, except those that are ``keys`` of the tasks."""
    return sorted(each for each in placeholders(new) - _kept(old) if each.strip("{} ") not in keys)


def _kept(old: TextResource) -> frozenset[str]:
    """Return the placeholders of the old text; empty if that text is broken, so that an edit can repair it."""
    try:
        return placeholders(old)
    except ConfigError:
        return frozenset()


def _value(old: Json, text: str) -> Json:
    """Parse the text of a value as JSON; if the old value is a string, the text is the new value."""
    if isinstance(old, str):
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"it is not JSON, as the resource is: {error}") from None
    if type(value) is not type(old) and not {type(old), type(value)} <= {int, float}:
        raise ConfigError(f"it is {_kind(value)}, and the resource is {_kind(old)}; keep the kind of the value")
    return value


def _kind(value: Any) -> str:
    return next((words for kind, words in _KINDS.items() if isinstance(value, kind)), "a number")


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
        raise ConfigError(
            f"it has {{{wrong[0][:40]}}}, which is not a placeholder; write literal braces as {{{{ and }}}}"
        )
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
        raise ConfigError(f"its line {error.lineno} is not a jinja template: {error.message}") from None
