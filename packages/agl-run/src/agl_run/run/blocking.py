"""Runs an experiment's coroutine from a script, from a notebook, or next to the event loop of an async program.

All experiments of a process run on one event loop, in a thread of its own, which lives as long as the process. An
asynchronous client belongs to the loop on which it was first used; with one loop, a client that an agent's module
creates also works in the next experiment.
"""

import asyncio
import atexit
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from functools import cache
from os import getpid
from typing import Any, Generic, TypeVar

from agl.errors import ConfigError, RunError

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


def require_blocking(method: str) -> None:
    """Refuse to block the event loop of an async program or of an agent; a notebook's loop may be blocked.

    Raises:
        ConfigError: An event loop runs in this thread; the message names the method to await instead.
    """
    # A notebook has a loop that its cells may block; an async program's loop serves others.
    running = _running_loop()
    if running is not None and (not _is_notebook() or running is _home(getpid()).loop):
        raise ConfigError(
            f"Trainer.{method}() blocks until it is done, and an event loop runs here; "
            f"write: await trainer.{method}_async(...)"
        )


def run_blocking(work: Work[T]) -> T:
    """Run a coroutine on the event loop that experiments share, and block until the coroutine ends."""
    return _Run(work).wait()


async def run_beside(work: Work[T]) -> T:
    """Run a coroutine on the event loop that experiments share, so that it never delays the caller's loop.

    If the caller is cancelled, the coroutine is cancelled too, and the caller waits for its end.
    """
    return await _Run(work).wait_async()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


SAME_S = 1.0
"""Seconds within which several interrupts count as one: a terminal and a wrapper program may both send one."""

AT_ONCE_S = 10.0
"""Seconds that a run may take to end after a second interrupt; a third interrupt ends the process at once."""


class _Home:
    """The event loop that experiments share; it runs in a dedicated thread until the interpreter ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="agl-trainer", daemon=True)
        self._thread.start()
        atexit.register(self._close)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        # An interrupt that hits this thread must not end the loop of a run that is still being
        # stopped.
        while not self._is_over:
            with suppress(KeyboardInterrupt, SystemExit):  # a task's own; raised again where its result is asked for
                self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _close(self) -> None:
        def end() -> None:
            self._is_over = True
            self.loop.stop()

        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(end)
            # Bounded: an agent that blocks must not keep the interpreter from ending.
            self._thread.join(1.0)


@cache
def _home(process: int) -> _Home:
    """Return this process's event loop for experiments; a forked child gets a new one, as threads end in a fork."""
    # The argument is the key of the cache and nothing else.
    del process
    return _Home()


@contextmanager
def _handled(handler: Callable[..., None]) -> Generator[None]:
    """Call ``handler`` for the signals that raise KeyboardInterrupt, wherever this thread is.

    A finaliser, in which this thread may be at that moment, would swallow the exception.
    """
    is_main = threading.current_thread() is threading.main_thread()  # no other thread receives signals
    numbers = signal.valid_signals() if is_main else ()
    ours = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)


class _Run(Generic[T]):
    """A coroutine that runs on the event loop that experiments share."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._home = _home(getpid())
        self._loop = self._home.loop
        self._task: asyncio.Task[T] | None = None
        self._ended = threading.Event()
        self._interrupts: list[float] = []
        self._give_up_at = math.inf
        # The task is made in the loop's own thread, as asyncio demands.
        self._loop.call_soon_threadsafe(self._start)

    def wait(self) -> T:
        """Block until the coroutine ends; an interrupt stops the run, and a second one also ends its current step."""
        with _handled(self._interrupt):
            while not self._ended.is_set() and time.monotonic() < self._give_up_at:
                try:
                    self._ended.wait(0.2)  # waits without a limit ignore Ctrl-C on Windows
                except KeyboardInterrupt:  # of a handler that the program has set
                    self._interrupt()
        if self._interrupts:
            raise KeyboardInterrupt
        return self._outcome()

    def _interrupt(self, *_: object) -> None:
        now = time.monotonic()
        # The terminal sends Ctrl-C to the whole process group, and wrapper programs may send it again.
        if self._interrupts and now - self._interrupts[-1] < SAME_S:
            return
        self._interrupts.append(now)
        self._cancel()
        if len(self._interrupts) > 1:  # at once the process would end while the run still writes
            self._give_up_at = now + (AT_ONCE_S if len(self._interrupts) == 2 else 0.0)

    async def wait_async(self) -> T:
        """Wait for the coroutine without blocking the caller's loop; cancelling the wait stops the coroutine."""
        try:
            await asyncio.to_thread(self._ended.wait)
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.to_thread(self._ended.wait)
            raise
        return self._outcome()

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(lambda _: self._ended.set())

    def _cancel(self) -> None:
        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _outcome(self) -> T:
        if self._task is None:
            raise RuntimeError("the experiment was never started")
        try:
            return self._task.result()
        # Signals reach the main thread only, so code that ran in this loop raised these, such as a plugin's. Raised
        # here they would end the program without a word, or look like Ctrl-C.
        except (SystemExit, KeyboardInterrupt) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{frame.filename}:{frame.lineno} raised {type(error).__name__} and ended the run"
            raise RunError(f"{what}; raise an Exception there") from error
