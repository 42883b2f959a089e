"""Waits in tests until a condition holds, up to a deadline that even a busy machine meets.

``wait_until`` blocks the thread, and ``eventually`` lets the event loop run. Both check the condition often, so that a
test waits little longer than it must, and raise an ``AssertionError`` with the condition's last value at the deadline.
``stopwatch`` measures the time that the process itself takes.
"""

import inspect
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")

PATIENCE_S = 120.0
"""Longest wait in seconds: many times what any test needs, for busy machines."""


def wait_until(condition: Callable[[], T], *, within_s: float = PATIENCE_S, every_s: float = 0.01) -> T:
    """Call ``condition`` until it returns a true value, and return that value.

    Raises:
        AssertionError: The value was still false after ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise _too_late(found, within_s)
        time.sleep(every_s)
    return found


async def eventually(
    condition: Callable[[], T | Awaitable[T]], *, within_s: float = PATIENCE_S, every_s: float = 0.01
) -> T:
    """Call ``condition``, awaiting its result if needed, until it gives a true value, and return that value.

    Raises:
        AssertionError: The value was still false after ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while not (found := await _result_of(condition)):
        if time.monotonic() > deadline:
            raise _too_late(found, within_s)
        await sleep(every_s)
    return found


def stopwatch() -> Callable[[], float]:
    """Start a stopwatch, and return a function that gives the seconds that this process has taken since.

    The result is the smaller of the elapsed time and the CPU time of all threads. Time that other processes take on a
    busy machine therefore does not count, and neither does sleep.
    """
    clock_s, own_s = time.perf_counter(), time.process_time()
    return lambda: min(time.perf_counter() - clock_s, time.process_time() - own_s)


async def _result_of(condition: Callable[[], T | Awaitable[T]]) -> T:
    result = condition()
    return cast("T", await result if inspect.isawaitable(result) else result)


def _too_late(found: object, within_s: float) -> AssertionError:
    return AssertionError(f"the condition was still {found!r} after {within_s:g} s; raise within_s or look what hangs")
