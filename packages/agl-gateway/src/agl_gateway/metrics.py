"""The gateway's metrics in Prometheus' text format."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

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


def render(lines: Iterable[tuple[str, str, str, Mapping[str, float] | float]]) -> str:
    """Render metrics as text.

    Args:
        lines: Name, type, help, and one number or numbers by policy.
    """
    out: list[str] = []
    for name, kind, text, values in lines:
        out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        if isinstance(values, Mapping):
            out += [f'{name}{{policy="{_escaped(policy)}"}} {value:g}' for policy, value in values.items()]
        else:
            out.append(f"{name} {values:.12g}")
    return "\n".join(out) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
