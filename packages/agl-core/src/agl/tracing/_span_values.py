"""Converts values and exceptions to JSON without credentials, as spans hold them."""

import time
import traceback
from collections.abc import Mapping
from typing import Any, cast

from agl._redact import redact
from agl.schemas import SpanEvent

_PLAIN = frozenset({str, int, float, bool, type(None)})


def error_fields(error: BaseException) -> dict[str, Any]:
    """The fields of a span that ended with ``error``: status, message, and an ``exception`` event."""
    text, trace = redact(_text(error)), redact("".join(traceback.format_exception(error)))
    detail = {"exception.type": type(error).__qualname__, "exception.message": text, "exception.stacktrace": trace}
    event = SpanEvent(name="exception", time_ns=time.time_ns(), attributes=detail)
    return {"status": "error", "status_message": text, "events": (event,)}


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # isolation point: the agent's own class
        return f"<{type(value).__qualname__}: its __str__ raised>"


def plain(value: Any) -> Any:
    """A copy of ``value`` that JSON can carry, without credentials; other types become their text."""
    if type(value) is str:
        return redact(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_text(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("list[Any]", value)]
    return redact(_text(value))
