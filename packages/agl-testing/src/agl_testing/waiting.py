"""Waits in tests until a condition holds, up to a deadline that a busy machine keeps too.

``wait_until`` blocks the thread; ``eventually`` lets the event loop go on. Both look often, so that a test waits hardly
longer than it has to, and fail with an ``AssertionError`` that shows the condition's last value. ``stopwatch`` says
how long the process itself took over something.
"""

import inspect
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")

PATIENCE_S = 120.0
"""Seconds to wait at most: many times what anything takes here, for machines that do much else."""


def wait_until(condition: Callable[[], T], *, within_s: float = PATIENCE_S, every_s: float = 0.01) -> T:
    """Call ``condition`` until it returns something true, and return that.

    Raises:
        AssertionError: It was still false after ``within_s`` seconds.
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
    """Call ``condition``, or await its result, until the result is true, and return that.

    Raises:
        AssertionError: It was still false after ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while not (found := await _result_of(condition)):
        if time.monotonic() > deadline:
            raise _too_late(found, within_s)
        await sleep(every_s)
    return found


def stopwatch() -> Callable[[], float]:
    """Start a watch and return it: a call says how many seconds this process has taken since then.

    They are the lesser of the seconds on the clock and the processor's seconds of all threads, so that the time of
    other processes on a busy machine does not count, and neither does a sleep.
    """
    clock_s, own_s = time.perf_counter(), time.process_time()
    return lambda: min(time.perf_counter() - clock_s, time.process_time() - own_s)


async def _result_of(condition: Callable[[], T | Awaitable[T]]) -> T:
    result = condition()
    return cast("T", await result if inspect.isawaitable(result) else result)


def _too_late(found: object, within_s: float) -> AssertionError:
    return AssertionError(f"the condition was still {found!r} after {within_s:g} s; raise within_s or look what hangs")
