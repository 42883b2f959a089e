"""A blocking run finishes its work before it raises an interrupt: one Ctrl-C, two at once, or a second one later.

Exits that the work itself raises are errors.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from agl.errors import RunError
from agl_run.run.blocking import SAME_S, run_blocking


class Work:
    """Work that waits until it is stopped, and then takes some time to end; it counts the stops."""

    def __init__(self, *, ending_s: float) -> None:
        self.ending_s, self.stops, self.has_ended = ending_s, 0, False
        self.began = threading.Event()

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.stops += 1
            await self._end()
            raise

    async def _end(self) -> None:
        try:
            await asyncio.sleep(self.ending_s)
        except asyncio.CancelledError:
            self.stops += 1
            raise
        finally:
            self.has_ended = True


def interrupted(work: Work, *pauses_s: float) -> None:
    """Run the work, and interrupt it after each of the given pauses."""

    def interrupt() -> None:
        assert work.began.wait(10)
        for pause_s in pauses_s:
            threading.Event().wait(pause_s)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_blocking(work.run)
    thread.join()


def test_interrupts_at_a_time_count_as_one() -> None:
    work = Work(ending_s=0.5)
    interrupted(work, 0.1, 0.01, 0.1)
    assert (1, True) == (work.stops, work.has_ended)


def test_interrupt_while_the_work_ends_stops_that_as_well() -> None:
    work = Work(ending_s=60.0)
    interrupted(work, 0.1, SAME_S + 0.1)
    assert (2, True) == (work.stops, work.has_ended)


def test_interrupt_is_raised_although_the_work_ends_in_spite_of_it() -> None:
    class Stubborn(Work):
        async def run(self) -> None:
            with suppress(asyncio.CancelledError):
                await super().run()

    work = Stubborn(ending_s=0.0)
    interrupted(work, 0.1)
    assert (1, True) == (work.stops, work.has_ended)


def signalled(work: Work, handler: Callable[..., None]) -> None:
    """Run the work, and call ``handler`` during it by a signal."""
    before = signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_blocking(work.run)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_interrupt_by_a_handler_of_the_program_lets_the_work_end() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    work = Work(ending_s=0.5)
    signalled(work, interrupt)
    assert (1, True) == (work.stops, work.has_ended)


def test_interrupt_during_a_finaliser_stops_the_work() -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)  # an exception that its handler raised would be ignored here

    objects = [Dying()]
    work = Work(ending_s=0.0)
    signalled(work, lambda *_: objects.clear())
    assert (1, True) == (work.stops, work.has_ended)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_exit_that_code_of_the_run_raises_is_an_error_with_its_place(error: BaseException) -> None:
    async def work() -> None:
        raise error

    with pytest.raises(RunError, match=rf"test_interrupts\.py:\d+ raised {type(error).__name__}"):
        run_blocking(work)
