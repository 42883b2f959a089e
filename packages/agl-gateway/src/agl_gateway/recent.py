"""A mapping of limited size that drops its oldest entries; the gateway caches attempts and rollouts in it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """Holds at most ``limit`` entries; adding one more drops the oldest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)

    def touched(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry of ``key`` and make it the newest; a missing entry is created with ``make``."""
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        return self[key]
