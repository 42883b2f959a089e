"""Waking whoever waits for a store to change, in any thread and event loop."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable


class Bell:
    """Rings for all that wait. Read :attr:`count` before looking for work, and pass it to :meth:`wait`.

    A ring between the two is then never missed: ``wait`` returns at once.
    """

    def __init__(self, *, on_wait: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._on_wait = on_wait
        self.count = 0

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return when the bell rang after ``seen`` was read, or after ``timeout_s`` seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.count != seen:
                return
            self._waiting[future] = loop
        if self._on_wait is not None:
            self._on_wait()
        try:
            await asyncio.wait((future,), timeout=max(0.0, timeout_s))
        finally:
            with self._lock:
                self._waiting.pop(future, None)

    def ring(self) -> None:
        """Wake everybody; may be called from any thread."""
        with self._lock:
            self.count += 1
            waiting, self._waiting = self._waiting, {}
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
        for future, loop in waiting.items():
            by_loop[loop].append(future)
        for loop, futures in by_loop.items():
            call_in(loop, lambda futures=futures: _wake(futures))


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    """Run ``callback`` in ``loop`` from any thread; false when the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop was closed: nobody waits there any more
        return False
    return True


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
