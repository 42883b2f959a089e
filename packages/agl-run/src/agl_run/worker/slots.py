"""The slots of a worker: how many agents run at once, and how long slots were taken."""

import time
from collections.abc import Callable


class Slots:
    """Counts the agents that run, and adds up the time that they do.

    Args:
        count: Agents that may run at once; 0 where other machines run them all.
        clock: Returns seconds that only grow.

    Attributes:
        taken: Agents that run now.
    """

    def __init__(self, count: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = count
        self.taken = 0
        self._clock = clock
        self._since = clock()
        self._total_s = 0.0

    @property
    def free(self) -> int:
        """Agents that may start."""
        return self.count - self.taken

    def now(self) -> tuple[float, float]:
        """Return the time, and the seconds that all agents together have run until then."""
        now = self._clock()
        self._total_s += self.taken * (now - self._since)
        self._since = now
        return now, self._total_s

    def take(self) -> None:
        """Note that an agent starts."""
        self.now()
        self.taken += 1

    def leave(self) -> None:
        """Note that an agent has ended."""
        self.now()
        self.taken -= 1
