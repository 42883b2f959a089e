"""Checks the type of a setting's value; the error names the key, the value, and what to write instead."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from agl.errors import ConfigError
from agl.hints import did_you_mean

EXAMPLES = {
    "agent": 'write "module:attribute", such as agent = "agent:solve", or a command as an array of words: '
    'agent = ["python", "agent.py"]',
    "older_than": 'write a duration in quotes, such as older_than = "30d"',
    "plugins": 'write plugins = { disabled = ["NAME"] }, the only key of it',
    "process": 'write process = true, process = false, or process = "auto"',
    "reward_weights": "write the weights by reward: reward_weights = { NAME = 1.0 }",
    "timeout_s": "write a number of seconds without quotes, such as timeout_s = 60",
    "use": 'write a name in quotes, such as use = "NAME"',
}
"""Advice by key, for keys whose type alone does not show what to write."""


def check_value(value: Any, hint: Any, where: str) -> Any:
    """Convert a key's value to the type ``hint``; raises :class:`ConfigError` if the value does not fit."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        key = where.rpartition(".")[2]
        # The most specific advice wins: the bounds of this key, then an example for it, then its
        # type.
        remedy = _bounds(value, hint) or EXAMPLES.get(key) or _remedy(key, value, hint)
        raise ConfigError(f"{where} is {shown(value)}; {remedy}") from None


def _bounds(value: Any, hint: Any) -> str:
    """Describe the allowed range if ``hint`` is a number with bounds; ``""`` if the value is not a number."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return get_args(hint)[1].description if is_number and get_origin(hint) is Annotated else ""


def _remedy(key: str, value: Any, hint: Any) -> str:
    """Return advice for a value of the wrong type: what to write instead."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return _one_of(value, get_args(hint))
    if get_origin(hint) is tuple:
        return _array(key, value, get_args(hint)[0])
    # A number in quotes is shown without them.
    number = value if isinstance(value, str) and value.isdecimal() else "8"
    return {
        bool: f"write {key} = true or {key} = false, without quotes",
        int: f"write a whole number without quotes, such as {key} = {number}",
        float: f"write a number without quotes, such as {key} = 0.5",
        str: f'write one text in quotes: {key} = "..."',
    }.get(hint, f"write a table, such as {key} = {{ NAME = VALUE }}")


def _array(key: str, value: Any, item: Any) -> str:
    choices = get_args(item) if get_origin(item) is Literal else ()
    if isinstance(value, str) and (not choices or value in choices):
        return f"write {key} = [{shown(value)}]"
    if choices:
        return f"write an array of {' or '.join(choices)}, such as {key} = [{shown(choices[0])}]"
    return f'write an array of texts, such as {key} = ["NAME"]'


def _one_of(value: Any, choices: tuple[str, ...]) -> str:
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"write one of {', '.join(choices)}" + (f"; {near}" if near else "")


def shown(value: Any) -> str:
    """Format a value as JSON, shortened to 60 characters."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
