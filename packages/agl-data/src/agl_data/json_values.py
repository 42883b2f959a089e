"""JSON values that files and stores cannot carry, and what is written in their place."""

import re
from typing import Any, cast

import msgspec

from agl.schemas import Json

CHANGED = "rollouts with halves of characters, which were replaced, or integers beyond 64 bits, now texts"
"""The loss that :func:`storable` is in an export."""

_HALVES = re.compile("[\ud800-\udfff]")
_LARGEST, _SMALLEST = (1 << 64) - 1, -(1 << 63)


def storable(value: Json) -> Json:
    """Return a value as JSON carries it: halves of characters replaced, integers beyond 64 bits as texts."""
    if isinstance(value, str):
        return _HALVES.sub("\ufffd", value)
    if isinstance(value, int) and not _SMALLEST <= value <= _LARGEST:
        return str(value)
    if isinstance(value, list | tuple):
        return [storable(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_HALVES.sub("\ufffd", key): storable(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, msgspec.Struct):
        return storable(msgspec.structs.asdict(value))
    return value
