"""Converts foreign JSON, which may be anything, to the types that a reader expects."""

from typing import Any, cast


def is_list(value: object) -> bool:
    """True if ``value`` is an array."""
    return isinstance(value, list)


def as_text(value: object) -> str:
    """``value`` if it is text, else ``""``."""
    return value if isinstance(value, str) else ""


def as_index(value: object) -> int:
    """``value`` if it is an index, else 0."""
    return value if isinstance(value, int) else 0


def as_dict(value: object) -> dict[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """``value`` if it is an array, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def dicts_in(value: object) -> list[dict[str, Any]]:
    """The objects in ``value`` if it is an array, else none."""
    return [item for item in as_list(value) if isinstance(item, dict)]
