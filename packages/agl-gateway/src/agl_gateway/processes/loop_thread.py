"""Runs an event loop in its own thread, for work that must neither block the caller's loop nor end with it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in its own thread, which runs coroutines for callers in any event loop.

    Start it before use; stop it to end the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def is_running(self) -> bool:
        """True between :meth:`start` and :meth:`stop`."""
        return self._loop is not None

    def start(self) -> None:
        """Start the thread unless it runs already. Several threads may call this at once."""
        with self._starting:
            if self._loop is not None:
                return
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await ``make()`` in the thread's loop and return its result; cancelling the caller cancels the coroutine."""
        if self._loop is None:
            raise RuntimeError(f"the thread {self._name!r} is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self._loop))

    async def stop(self) -> None:
        """Cancel the tasks in the loop and end the thread; idempotent."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
