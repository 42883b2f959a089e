"""Rewards a text for its form: a pattern, tags, the structure of JSON, a length."""

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Json, Reward, Rollout, Span
from agl_rewards.source import text_source, unfenced

Check = Callable[[str], str]
"""A check of a text: a function that returns the text's fault, or ``""`` if the text passes."""

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "any": (object,),
}


class Format:
    """Gives 1.0 if the text passes every declared check, else 0.0; each check is also a dimension.

    Args:
        source: Where the text comes from; see :mod:`agl_rewards.source`.
        pattern: Regular expression that must match somewhere; ``.`` matches line breaks too.
        tags: Names of tags, such as ``think``. Each must be opened and closed exactly once, in this order and without
            nesting.
        json: Keys that the text, or the fenced block of JSON in it, must have as an object, and their types:
            string, number, integer, boolean, array, object, null, any.
        max_length: The most characters; 0 for no limit.
        min_length: The least characters; a shorter text fails every check. 1 by default, so that an empty text fails.
        partial: Whether the value is the share of checks that passed.
        name: The reward's name.

    Raises:
        ConfigError: No check is declared, or a regular expression, a type or a length is wrong.
    """

    def __init__(
        self,
        *,
        source: str = "answer",
        pattern: str = "",
        tags: list[str] | None = None,
        json: dict[str, str] | None = None,
        max_length: int = 0,
        min_length: int = 1,
        partial: bool = False,
        name: str = "format",
    ) -> None:
        self._text = text_source(source)
        self._checks: dict[str, Check] = {}
        if pattern:
            self._checks["pattern"] = _pattern_check(pattern)
        if tags:
            self._checks["tags"] = _tags_check(tags)
        if json is not None:
            self._checks["json"] = _json_check(json)
        if max_length:
            self._checks["length"] = _length_check(min_length, max_length)
        if not self._checks:
            raise ConfigError("format has nothing to check; set pattern, tags, json or max_length")
        self._partial = partial
        self._min_length = min_length
        self._name = name

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Return the reward of one attempt."""
        text = self._text(spans)
        is_long_enough = len(text) >= self._min_length
        faults = {
            label: check(text) if is_long_enough else "the text is too short" for label, check in self._checks.items()
        }
        passed = [float(not fault) for fault in faults.values()]
        return Reward(
            value=sum(passed) / len(passed) if self._partial else min(passed),
            name=self._name,
            dimensions=dict(zip(faults, passed, strict=True)),
            source="evaluator",
            feedback="; ".join(dict.fromkeys(fault for fault in faults.values() if fault)),
        )


def _pattern_check(pattern: str) -> Check:
    try:
        regex = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"format's pattern {pattern!r} is not a regular expression: {error}; correct it") from error
    return lambda text: "" if regex.search(text) else f"the text does not match {pattern!r}"


def _tags_check(tags: Sequence[str]) -> Check:
    wanted = [part for tag in tags for part in (f"<{tag}>", f"</{tag}>")]
    regex = re.compile("|".join(map(re.escape, wanted)))

    def check(text: str) -> str:
        found = regex.findall(text)  # the tags alone, in order; equal lists exclude nesting and repetition
        return "" if found == wanted else f"expected the tags {' '.join(wanted)}, got {' '.join(found) or 'none'}"

    return check


def _json_check(shape: dict[str, str]) -> Check:
    for key, kind in shape.items():
        if kind not in _TYPES:
            hint = did_you_mean(kind, _TYPES, otherwise=f"use one of {', '.join(_TYPES)}")
            raise ConfigError(f"format's json has the type {kind!r} for {key!r}; {hint}")

    def check(text: str) -> str:
        try:
            value: Any = msgspec.json.decode(unfenced(text, "json"))
        except (msgspec.DecodeError, RecursionError) as error:
            return f"the text is not JSON: {error}"
        if not isinstance(value, dict):
            return "the text is not a JSON object"
        members = cast("dict[str, Any]", value)
        missing = [key for key in shape if key not in members]
        wrong = [
            f"{key} is not of type {kind}"
            for key, kind in shape.items()
            if key in members and not _has_type(members[key], kind)
        ]
        return ", ".join([*(f"{key} is missing" for key in missing), *wrong])

    return check


def _has_type(value: Json, kind: str) -> bool:
    is_number_like_bool = isinstance(value, bool) and kind in ("number", "integer")  # in Python a bool is an int
    return isinstance(value, _TYPES[kind]) and not is_number_like_bool


def _length_check(least: int, most: int) -> Check:
    if not 0 <= least <= most:
        raise ConfigError(
            f"format got min_length = {least} and max_length = {most}; give 0 <= min_length <= max_length"
        )
    return lambda text: "" if len(text) <= most else f"the text has {len(text)} characters, more than {most}"
