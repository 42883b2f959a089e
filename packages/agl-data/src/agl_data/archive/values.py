"""Values that have columns of their own: JSON as text, token ids and log-probabilities as lists, times as timestamps.

A value leaves its record only where its column gives it back exactly. Any other stays in the record, and its column
holds the nearest value that it can.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from agl.schemas import encode, from_json, to_json
from agl_data.archive.arrow import Kind, Row

_MICRO = 1_000_000
_MOST_MICROS = 253_402_300_800 * _MICRO
"""The year 10000, behind which no library shows a time."""


def row_of(record: Any, columns: Mapping[str, Kind]) -> Row:
    """Return the columns that have the names of a record's fields: integers and times as columns hold them.

    A column of texts holds a field that is not text as JSON.
    """
    found = {name: getattr(record, name) for name in columns if hasattr(record, name)}
    return {name: _as_column(value, columns[name]) for name, value in found.items()}


def _as_column(value: Any, kind: Kind) -> Any:
    match kind:
        case "int":
            return integer(value)
        case "time":
            return micros(value)
        case "text" if value is not None and not isinstance(value, str):
            return json_text(value)[0]
        case _:
            return value


def json_text(value: Any) -> tuple[str, bool]:
    """Return a value as JSON, and whether that is exact."""
    data = to_json(value)
    try:
        is_exact = encode(from_json(data, object)) == encode(value)
    except msgspec.DecodeError:
        is_exact = False
    return data.decode(), is_exact


def micros(seconds: float) -> int | None:
    """Return Unix seconds as microseconds; ``None`` for 0, which stands for no time, and for what is no time."""
    return _time(round(seconds * _MICRO)) if math.isfinite(seconds) else None


def micros_of_ns(nanoseconds: int) -> int | None:
    """Return Unix nanoseconds as microseconds; ``None`` as for :func:`micros`."""
    return _time(nanoseconds // 1000)


def integer(value: Any) -> int | None:
    """Return an integer that a column of 64 bits takes, ``None`` for other values."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and -(1 << 63) <= value < 1 << 63 else None


def _time(value: int) -> int | None:
    return value if 0 < value < _MOST_MICROS else None
