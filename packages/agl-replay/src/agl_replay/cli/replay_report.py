"""Describes the changes in a replay: outcome, reward, output and the number of calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl import semconv
from agl.schemas import Episode, Record, Span
from agl_inspect.rollouts import difference


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
