"""Reads values from foreign JSON, in which any field may be missing or have an unexpected type."""

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
    """Return the value if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: Json) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def as_text(value: Json) -> str:
    """Return the value if it is text, else an empty text."""
    return value if isinstance(value, str) else ""


def dicts_in(value: Json) -> list[dict[str, Any]]:
    """Return the items of a list that are objects; empty if the value is not a list."""
    return [as_dict(item) for item in as_list(value) if isinstance(item, dict)]


def number_of(value: Json) -> float | None:
    """Return a finite number as a float, with true and false as 1 and 0; ``None`` for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole_of(value: Json) -> int | None:
    """Return a number without its fraction; ``None`` if its magnitude is 1e18 or more, or for anything else."""
    number = number_of(value)
    return int(number) if number is not None and abs(number) < _MOST_WHOLE else None


def text_of(content: Json) -> str:
    """Return the text of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(as_text(part.get("text")) for part in dicts_in(content))


def json_text(value: Json) -> str:
    """Return a text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def digest(*values: Json, size: int) -> str:
    """Return a digest of the values, of ``size`` bytes, in hexadecimal digits."""
    data = msgspec.msgpack.encode(values, order="deterministic")
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def ns_of(time: Json) -> int:
    """Convert an ISO 8601 time to Unix nanoseconds; 0 for anything else. A time without a zone counts as UTC."""
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
    """Return an integer as Unix nanoseconds, clipped to the range 0 to 2**63 - 1; 0 for anything else."""
    return min(max(int(value), 0), _LATEST) if isinstance(value, int) else 0


def ns_of_seconds(value: Json) -> int:
    """Convert a number of seconds to nanoseconds, clipped as :func:`whole_ns` does; 0 for anything else."""
    return whole_ns(int(min(max(number_of(value) or 0.0, 0.0), _LATEST / 1e9) * 1e9))


def field_of(record: Json, name: str) -> Json:
    """Return a field by name or by a path such as ``extra.score``; ``None`` if it does not exist."""
    fields = as_dict(record)
    if name in fields:
        return fields[name]
    head, dot, rest = name.partition(".")
    return field_of(fields.get(head), rest) if dot else None


def first(values: Iterable[Json]) -> Json:
    """Return the first value that is not empty; ``None`` if all are empty."""
    return next((value for value in values if value not in (None, "", [], {})), None)
