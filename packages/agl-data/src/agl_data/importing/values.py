"""Narrows foreign JSON, in which any field may be missing or of another type, and reads its times and numbers."""

import hashlib
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from agl.schemas import Json

_LATEST = (1 << 63) - 1
_MOST_WHOLE = 1e18
_FRACTION = re.compile(r"[.,](\d+)")


def as_dict(value: Json) -> dict[str, Any]:
    """Return an object, an empty one for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: Json) -> list[Any]:
    """Return a list, an empty one for anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def as_text(value: Json) -> str:
    """Return a text, an empty one for anything else."""
    return value if isinstance(value, str) else ""


def dicts_in(value: Json) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [as_dict(item) for item in as_list(value) if isinstance(item, dict)]


def number_of(value: Json) -> float | None:
    """Return a finite number, true and false as 1 and 0; ``None`` for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole_of(value: Json) -> int | None:
    """Return a number without its fraction, ``None`` for one that no store takes and for anything else."""
    number = number_of(value)
    return int(number) if number is not None and abs(number) < _MOST_WHOLE else None


def text_of(content: Json) -> str:
    """Return the text of a message's content: a text, or the text parts of a list."""
    if isinstance(content, str):
        return content
    return "".join(as_text(part.get("text")) for part in dicts_in(content))


def json_text(value: Json) -> str:
    """Return a value as JSON, a text as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def digest(*values: Json, size: int) -> str:
    """Return hexadecimal digits, two for each byte of ``size``, that are the same for the same values."""
    data = msgspec.msgpack.encode(values, order="deterministic")
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def ns_of(time: Json) -> int:
    """Return Unix nanoseconds of an ISO 8601 time; 0 for anything else. A time without a zone is in UTC."""
    text = as_text(time)
    fraction = _FRACTION.search(text)
    try:
        moment = datetime.fromisoformat(text.replace(fraction[0], "") if fraction else text)
    except ValueError:
        return 0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    nanoseconds = int(fraction[1][:9].ljust(9, "0")) if fraction else 0
    return whole_ns(int(moment.timestamp()) * 1_000_000_000 + nanoseconds)


def whole_ns(value: Json) -> int:
    """Return Unix nanoseconds of an integer, cut to the range of a store; 0 for anything else."""
    return min(max(int(value), 0), _LATEST) if isinstance(value, int) else 0


def field_of(record: Json, name: str) -> Json:
    """Return a field by its name, or by a path such as ``extra.score``; ``None`` where there is none."""
    fields = as_dict(record)
    if name in fields:
        return fields[name]
    head, dot, rest = name.partition(".")
    return field_of(fields.get(head), rest) if dot else None


def first(values: Iterable[Json]) -> Json:
    """Return the first value that is not empty; ``None`` without one."""
    return next((value for value in values if value not in (None, "", [], {})), None)
