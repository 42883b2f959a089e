"""Replaces JSON values that files and stores cannot hold, and writes recorded values as JSON lines."""

import math
import re
from typing import Any, cast

import msgspec

from agl.schemas import Json, to_json
from agl_inspect.exports import ExportSetup

CHANGED = "rollouts with halves of characters, which were replaced, or integers beyond 64 bits, now texts"
"""Description of the loss that an export counts when :func:`storable` had to replace values."""

NO_NUMBERS = "calls with log-probabilities that JSON has no numbers for (NaN, infinities): without any"

_HALVES = re.compile("[\ud800-\udfff]")
_LARGEST, _SMALLEST = (1 << 64) - 1, -(1 << 63)


def storable(value: Json) -> Json:
    """Return a value that JSON can hold: lone surrogates are replaced, and integers beyond 64 bits become text."""
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


class LineFile:
    """Writes JSON values to the file of an export, one per line."""

    def __init__(self, setup: ExportSetup) -> None:
        self._file, self._losses = setup.file, setup.losses

    def write(self, value: Json, rollout_id: str) -> None:
        """Write a value; if it must be made storable first, count that as a loss of the rollout."""
        try:
            line = to_json(value)
        except (UnicodeEncodeError, OverflowError):
            self._losses.add(CHANGED, rollout_id)
            line = to_json(storable(value))
        self._file.write(line + b"\n")


def are_numbers(values: list[float]) -> bool:
    """Return true if all of the values are finite."""
    return all(map(math.isfinite, values))


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields whose values are neither ``None`` nor empty."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}
