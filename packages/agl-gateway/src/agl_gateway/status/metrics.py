"""The gateway's metrics in Prometheus' text format."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

_WINDOW_S = 10


class SpanRate:
    """Spans per second over the last ten full seconds, and their total."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque()
        self.total = 0

    def add(self, count: int) -> None:
        """Count spans that were written now."""
        self.total += count
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + count)
        else:
            self._seconds.append((second, count))
            self._drop(second)

    def per_second(self) -> float:
        """Return the rate."""
        now = int(self._clock())
        self._drop(now)
        return sum(count for second, count in self._seconds if second < now) / _WINDOW_S

    def _drop(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] < now - _WINDOW_S:
            self._seconds.popleft()


Family = tuple[str, str, str, Mapping[str, float] | float]
"""A metric: its name, type and help, and one number, or numbers by policy."""


def render(families: Iterable[Family], *, label: str = "policy") -> str:
    """Render metrics as text.

    Args:
        families: The metrics.
        label: The label of numbers in a mapping.
    """
    out: list[str] = []
    for name, kind, text, values in families:
        out += [*_head(name, kind, text), *_lines(name, values, label=label)]
    return "\n".join(out) + "\n"


def labelled(processes: Mapping[int, Sequence[Family]]) -> str:
    """Render the metrics of several processes, each metric once, with the label ``process`` at every number."""
    families: dict[str, list[str]] = {}
    for number, found in sorted(processes.items()):
        for name, kind, text, values in found:
            lines = families.setdefault(name, _head(name, kind, text))
            lines += _lines(name, values, label="policy", more=f'process="{number}"')
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _lines(name: str, values: Mapping[str, float] | float, *, label: str, more: str = "") -> list[str]:
    if not isinstance(values, Mapping):
        return [f"{name}{{{more}}} {values:.12g}" if more else f"{name} {values:.12g}"]
    rest = f",{more}" if more else ""
    return [f'{name}{{{label}="{_escaped(key)}"{rest}}} {value:.12g}' for key, value in values.items()]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
