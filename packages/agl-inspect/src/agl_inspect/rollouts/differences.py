"""Describes the first difference between two values, or between a request and the most similar recorded one."""

from collections.abc import Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any

from agl.schemas import to_json

_CONTEXT = 24
_LIMIT = 100
_NOTHING = "nothing"


def difference(then: Any, now: Any) -> str:
    """Return ``was A, is B``, both cut to the differing part with a little context."""
    if not (isinstance(then, str) and isinstance(now, str)):
        return f"was {_whole(then)}, is {_whole(now)}"
    same = takewhile(lambda pair: pair[0] == pair[1], zip(then, now, strict=False))
    start = max(0, sum(1 for _ in same) - _CONTEXT)
    return f"was {_cut(then, start)}, is {_cut(now, start)}"


def nearest(asked: Sequence[Any], recorded: Sequence[Sequence[Any]]) -> str:
    """Describe the first difference between ``asked`` and the most similar recorded request; ``""`` without any."""
    if not recorded:
        return ""
    best = max(recorded, key=lambda messages: (_shared(asked, messages), -abs(len(messages) - len(asked))))
    for number, (now, then) in enumerate(zip_longest(asked, best), start=1):
        if now != then:
            role = _role(now) or _role(then)
            return f"message {number} ({role}) {difference(_content(then), _content(now))}"
    return "the request was recorded, and made fewer times"


def ending(messages: Sequence[Mapping[str, Any]]) -> str:
    """Describe a request by the last message of its conversation, on one line."""
    if not messages:
        return "an empty conversation"
    return f"{_role(messages[-1])}: {one_line(messages[-1].get('content'), 120)}"


def one_line(value: Any, limit: int) -> str:
    """Format a value on one line of at most ``limit`` characters."""
    text = " ".join((value if isinstance(value, str) else to_json(value).decode()).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _role(message: Mapping[str, Any] | None) -> str:
    return str(message.get("role", "")) if message else ""


def _content(message: Mapping[str, Any] | None) -> Any:
    if message is None:
        return None
    rest = {key: value for key, value in message.items() if key != "role"}
    return rest["content"] if set(rest) == {"content"} else rest


def _whole(value: Any) -> str:
    if isinstance(value, str):
        return _cut(value, 0)
    return _NOTHING if value is None else one_line(value, _LIMIT)


def _cut(text: str, start: int) -> str:
    return repr(("…" if start else "") + one_line(text[start:], _LIMIT)) if text else _NOTHING


def _shared(asked: Sequence[Any], recorded: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, recorded, strict=False)))
