"""Runs an experiment's coroutine from a script, from a notebook, and beside the event loop of an async program."""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from agl.errors import ConfigError

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


def require_blocking(method: str) -> None:
    """Refuse to block the event loop of an async program; a notebook's loop may be blocked.

    Raises:
        ConfigError: A loop runs here; names the method to await instead.
    """
    if _is_in_loop() and not _is_notebook():
        raise ConfigError(
            f"Trainer.{method}() blocks until it is done, and an event loop runs here; "
            f"write: await trainer.{method}_async(...)"
        )


def run_blocking(work: Work[T]) -> T:
    """Run a coroutine to its end: on a new loop here, or in another thread if a loop already runs here."""
    return _ThreadRun(work).wait() if _is_in_loop() else asyncio.run(work())


async def run_beside(work: Work[T]) -> T:
    """Run a coroutine on an event loop of its own in another thread, so that it never delays the caller's loop.

    Cancelling this stops the work and waits for its end.
    """
    return await _ThreadRun(work).wait_async()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


class _ThreadRun(Generic[T]):
    """A coroutine that runs on an event loop of its own in a thread."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agl-trainer", daemon=True)
        self._thread.start()

    def wait(self) -> T:
        """Block until it ends; an interrupt stops it first."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.2)
        except KeyboardInterrupt:
            self._cancel()
            self._thread.join()
            raise
        return self._outcome()

    async def wait_async(self) -> T:
        """Wait without blocking the loop; cancelling stops the work."""
        try:
            await asyncio.to_thread(self._thread.join)
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.to_thread(self._thread.join)
            raise
        return self._outcome()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.ensure_future(self._work())
            self._ready.set()
            await asyncio.wait({self._task})

        try:
            asyncio.run(main())
        except (KeyboardInterrupt, SystemExit):
            pass  # raised again where the result is asked for
        finally:
            self._ready.set()

    def _cancel(self) -> None:
        self._ready.wait()
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _outcome(self) -> T:
        if self._task is None:
            raise RuntimeError("the thread that runs the experiment could not start an event loop")
        return self._task.result()
