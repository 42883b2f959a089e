"""Wakes callers that wait for a store to change, in any thread and event loop."""

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable


class WakeUp:
    """Wakes all waiting callers. Read :attr:`count` before looking for work, and pass it to :meth:`wait`.

    If :meth:`ring` is called between the two, ``wait`` returns at once, so that no ring is missed.

    Args:
        on_wait: Called when a caller begins to wait; returns the seconds after which the caller is woken even without
            a ring, because of a deadline or because another process may have changed the data.
    """

    def __init__(self, *, on_wait: Callable[[], float] = lambda: math.inf) -> None:
        self._lock = threading.Lock()
        # Futures by their loop: one store serves several threads, each with a loop of its own.
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._on_wait = on_wait
        self.count = 0

    @property
    def is_awaited(self) -> bool:
        """True while at least one caller waits."""
        return bool(self._waiting)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until :meth:`ring` is called, or return at once if it was called since :attr:`count` was ``seen``.

        The wait lasts at most ``timeout_s`` seconds, and at most the seconds that ``on_wait`` returns.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.count != seen:
                return
            self._waiting[future] = loop
        try:
            # asyncio.wait and not wait_for, which cancels the future and raises; here a timeout is
            # an ordinary end.
            await asyncio.wait((future,), timeout=max(0.0, min(timeout_s, self._on_wait())))
        finally:
            with self._lock:
                self._waiting.pop(future, None)

    def ring(self) -> None:
        """Wake all waiting callers; may be called from any thread."""
        with self._lock:
            self.count += 1
            # Swapped under the lock and woken outside of it: a woken caller may wait again at once.
            waiting, self._waiting = self._waiting, {}
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
        for future, loop in waiting.items():
            by_loop[loop].append(future)
        for loop, futures in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, futures)
            except RuntimeError:  # the loop was closed, and its callers with it
                continue


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
