"""Converts values and exceptions for spans: to types that stores can hold, and without credentials."""

import time
import traceback
from collections.abc import Mapping
from typing import Any, cast

from agl._redact import redact
from agl.schemas import SpanEvent

# By exact type: subclasses, such as NumPy's float64, are not what msgpack carries.
_PLAIN = frozenset({float, bool, type(None)})
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
"""The smallest and the largest integer that msgpack can hold."""


def error_fields(error: BaseException) -> dict[str, Any]:
    """The fields of a span whose operation raised ``error``: status, message, and an ``exception`` event."""
    text, trace = redact(_text(error)), redact(whole("".join(traceback.format_exception(error))))
    detail = {"exception.type": type(error).__qualname__, "exception.message": text, "exception.stacktrace": trace}
    event = SpanEvent(name="exception", time_ns=time.time_ns(), attributes=detail)
    return {"status": "error", "status_message": text, "events": (event,)}


def _text(value: object) -> str:
    try:
        return whole(str(value))
    except Exception:  # noqa: BLE001  # isolation point: the agent's own class
        return f"<{type(value).__qualname__}: its __str__ raised>"


def whole(text: str) -> str:
    """Replace lone surrogates, which stores cannot hold, by escapes such as ``\\udcff``."""
    # The test is nearly free, and most text is ASCII.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """Return a copy of ``value`` that stores can hold, without credentials.

    Values of other types, and integers beyond 64 bits, become text. Lone surrogates become escapes.
    """
    # The commonest type first; every attribute of every span passes here.
    if type(value) is str:
        return redact(whole(value))
    if type(value) in _PLAIN or (type(value) is int and _LEAST <= value <= _MOST):
        return value
    if isinstance(value, Mapping):
        return {_text(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("list[Any]", value)]
    return redact(_text(value))
