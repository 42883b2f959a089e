"""Describes the changes in a replay: outcome, reward, output, and the agent's first different message."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any

from agl import semconv
from agl.schemas import Episode, Record, Span
from agl_run.cli.output import short

_CONTEXT = 24
_LIMIT = 100
_NOTHING = "nothing"


class ComparedRun(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One of the two runs: its episode, the agent's output, and the number of its calls."""

    episode: Episode
    output: Any = None
    calls: int = 0


def side_of(episode: Episode, spans: Sequence[Span]) -> ComparedRun:
    """Make the comparable form of a recorded run."""
    outputs = [span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes]
    calls = sum(span.call is not None for span in spans)
    return ComparedRun(episode=episode, output=outputs[-1] if outputs else None, calls=calls)


def compare(then: ComparedRun, now: ComparedRun) -> tuple[list[str], list[str]]:
    """Return the names of the equal parts, and a line for each changed one."""
    pairs = {name: (read(then), read(now)) for name, read in _READ.items()}
    equal = [name for name, (old, new) in pairs.items() if old == new]
    changed = [f"{name} {difference(old, new)}" for name, (old, new) in pairs.items() if old != new]
    return equal, changed


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


def _error(side: ComparedRun) -> str:
    error = side.episode.attempt.error if side.episode.attempt else None
    return f"{error.type}: {error.message}" if error else ""


_READ: Mapping[str, Callable[[ComparedRun], Any]] = {
    "status": lambda side: side.episode.rollout.status,
    "error": _error,
    "reward": lambda side: side.episode.reward,
    "output": lambda side: side.output,
    "calls": lambda side: side.calls,
}


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
    return _NOTHING if value is None else short(value, _LIMIT)


def _cut(text: str, start: int) -> str:
    return repr(("…" if start else "") + short(text[start:], _LIMIT)) if text else _NOTHING


def _shared(asked: Sequence[Any], recorded: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, recorded, strict=False)))
