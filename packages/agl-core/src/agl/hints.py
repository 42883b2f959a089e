"""Writes parts of messages: the name that was probably meant, what to write instead of a value, and counts."""

import inspect
import math
import os
import re
import shlex
import tomllib
import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from agl.errors import ConfigError

__all__ = ["check_table", "check_value", "closest", "count_of", "did_you_mean", "pip_install", "shown"]

R = TypeVar("R", bound=msgspec.Struct)

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
"""Words for the bounds of a number, by their names in :class:`msgspec.Meta`."""


def check_table(table: Mapping[str, Any], kind: type[R], where: str) -> R:
    """Convert a table, whose keys are fields of ``kind``, to that record; raises as :func:`check_value` does.

    Args:
        table: The table.
        kind: The record's type.
        where: The path of the table's keys, such as ``runner.params.``.
    """
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{key: check_value(value, hints[key], f"{where}{key}") for key, value in table.items()})


def check_value(value: Any, hint: Any, where: str, *, advice: str = "", example: Any = None) -> Any:
    """Convert a setting's value to the type ``hint``.

    Args:
        value: The value, as a file or a program gives it.
        hint: The type, which may have bounds by :class:`msgspec.Meta`.
        where: The setting, which the error names; its last word is the key.
        advice: What to write instead, for a type that does not show it.
        example: A value to write instead, such as the default.

    Raises:
        ConfigError: The value does not fit. The message has the setting, the value, and what to write instead.
    """
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        key = re.split(r"[. ]", where)[-1]
        remedy = _bounds(value, hint) or advice or _remedy(key, value, hint, where=where, example=example)
        raise ConfigError(f"{where} is {shown(value)}; {remedy or f'correct it: {error}'}") from None


def _bounds(value: Any, hint: Any) -> str:
    """Describe the allowed range if ``hint`` is a number with bounds; ``""`` unless the value is one too."""
    hint = _alternatives(hint)[0]
    if get_origin(hint) is not Annotated or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    kind, meta = get_args(hint)[:2]
    if kind not in (int, float):
        return ""
    limits = " and ".join(
        f"{_BOUNDS[name]} {getattr(meta, name)}" for name in _BOUNDS if getattr(meta, name) is not None
    )
    return meta.description or f"write a {'whole ' if kind is int else ''}number {limits}"


def _alternatives(hint: Any) -> list[Any]:
    """Return the types of a union except ``None``, or else the only type."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [part for part in parts if part is not types.NoneType]


def _remedy(key: str, value: Any, hint: Any, *, where: str, example: Any) -> str:
    """Return what to write instead of a value; ``""`` if it has the right type, and something else is wrong."""
    kinds = [get_args(part)[0] if get_origin(part) is Annotated else part for part in _alternatives(hint)]
    found = [_remedy_of(key, value, kind, where=where, example=example) for kind in kinds]
    return ", or ".join(found) if all(found) else ""


def _remedy_of(key: str, value: Any, kind: Any, *, where: str, example: Any) -> str:
    origin: Any = get_origin(kind) or kind
    inside = get_args(kind)
    if origin is Literal:
        return _one_of(value, inside)
    if not inspect.isclass(origin):
        return ""
    if inside and isinstance(value, dict) and issubclass(dict, origin):
        for name, item in cast("dict[str, Any]", value).items():
            check_value(item, inside[1], f"{where}.{name}")
    if inside and (origin is tuple or issubclass(list, origin)):
        return _array(key, value, inside, where=where)
    fitting: Any = dict if issubclass(origin, msgspec.Struct) else origin
    if isinstance(value, fitting) and not isinstance(value, bool):
        return ""
    # A number in quotes is shown without them.
    number = example if isinstance(example, int | float) else 8 if origin is int else 0.5
    number = value if isinstance(value, str) and value.isdecimal() else number
    texts: dict[Any, str] = {
        bool: f"write {key} = true or {key} = false, without quotes",
        int: f"write a whole number without quotes, such as {key} = {number}",
        float: f"write a number without quotes, such as {key} = {number}",
        str: f'write one text in quotes: {key} = "..."',
    }
    return texts.get(origin, f"write a table, such as {key} = {{ NAME = VALUE }}")


def _array(key: str, value: Any, items: tuple[Any, ...], *, where: str) -> str:
    item = get_args(items[0])[0] if get_origin(items[0]) is Annotated else items[0]
    choices = get_args(item) if get_origin(item) is Literal else ()
    if isinstance(value, str) and (item is str or value in choices):
        return f"write {key} = [{shown(value)}]"
    if choices:
        return f"write an array of {' or '.join(choices)}, such as {key} = [{shown(choices[0])}]"
    if item is str:
        return f'write an array of texts, such as {key} = ["NAME"]'
    if isinstance(value, list):
        ones = cast("list[Any]", value)
        each = items[:1] * len(ones) if ... in items or len(items) == 1 else items
        for number, (one, kind) in enumerate(zip(ones, each, strict=False)):
            check_value(one, kind, f"{where}[{number}]")
    return f"write an array of {'numbers' if item in (int, float) else 'values'}"


def _one_of(value: Any, choices: tuple[str, ...]) -> str:
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"write one of {', '.join(map(str, choices))}" + (f"; {near}" if near else "")


def shown(value: Any) -> str:
    """Format a value as JSON, shortened to 60 characters; a float that JSON lacks as Python writes it."""
    try:
        if isinstance(value, float) and not math.isfinite(value):
            return repr(value)
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def closest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the choice that is most similar to ``name``, or else the shortest that has ``name`` as a word.

    Returns ``""`` if no similarity reaches ``cutoff`` (at most 1) and no choice has the word; words have 3 letters or
    more.
    """
    every = list(choices)
    wordy = sorted((choice for choice in every if len(name) > 2 and name in re.split(r"[\W_]", choice)), key=len)
    return next(iter(get_close_matches(name, every, n=1, cutoff=cutoff) or wordy), "")


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(name: str, choices: Iterable[str], *, otherwise: str = "") -> str:
    """Return ``did you mean 'CHOICE'?`` with the choice most similar to ``name``; ``otherwise`` if none is similar."""
    near = closest(name, choices)
    return f"did you mean {near!r}?" if near else otherwise


def pip_install(package: str) -> str:
    """Return the command that installs a package, which may have extras: ``pip install 'agl-algo-torch[lora]'``.

    If agl runs from a checkout, the command installs the package, and its dependencies there, from the checkout.
    """
    name, bracket, extras = package.partition("[")
    # packages/agl-core/src/agl/hints.py: three levels up are the other packages, if this is a
    # checkout.
    folders = _folders(Path(__file__).parents[3] / name)
    # Each need is installed from the checkout too: pip would look for it in an index, and may find
    # an older release or nothing.
    words = [word for folder in dict.fromkeys(folders) for word in ("-e", folder)] or [name]
    words[-1] += bracket + extras
    return shlex.join(["pip", "install", *words])


def _folders(project: Path) -> list[str]:
    """Return the folders of a package's dependencies in the checkout, then its own; empty if it is not there."""
    if not os.path.isfile(project / "pyproject.toml"):  # false for a folder of another user, too
        return []
    needs = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    own = str(project.relative_to(Path.cwd()) if project.is_relative_to(Path.cwd()) else project)
    return [*(one for need in needs for one in _folders(project.with_name(re.split(r"[^\w-]", need)[0]))), own]
