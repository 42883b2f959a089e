"""Converts JSON of other programs to the types that a reader expects; a value of another type becomes empty."""

from collections.abc import Mapping
from typing import Any, cast


def is_list(value: object) -> bool:
    """True if ``value`` is a JSON array."""
    return isinstance(value, list)


def as_text(value: object) -> str:
    """Return ``value`` if it is text, else ``""``."""
    return value if isinstance(value, str) else ""


def as_index(value: object) -> int:
    """Return ``value`` if it is an integer, else 0."""
    return value if isinstance(value, int) else 0


def as_dict(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object, else an empty dict."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a JSON array, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def dicts_in(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects in ``value`` if it is an array, else an empty list."""
    # One odd entry must not cost the others; no answer of a backend makes a reader raise.
    return [item for item in as_list(value) if isinstance(item, dict)]


def version_in(body: Mapping[str, Any]) -> str:
    """The version of the weights that answered, as the body names it; ``""`` if the body names none.

    ``model_version`` is a text or a number. ``model_versions`` (of agl's policy server) and ``weight_versions`` (of
    vLLM) are lists of ``{"version": ..., "start": ..., "end": ...}``: an answer that crossed a weight update has
    several, which are joined with ``+``.
    """
    for listed in (body.get("model_versions"), body.get("weight_versions")):
        names = [_version(item) for item in as_list(listed)]
        if unique := list(dict.fromkeys(name for name in names if name)):
            return "+".join(unique)
    return _version(body.get("model_version"))


def _version(item: object) -> str:
    value = as_dict(item).get("version", item)
    return str(value) if isinstance(value, str | int) else ""
