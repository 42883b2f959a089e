"""Operations that wait for a store's thread, and their answers on the way back into the callers' event loops."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from agl.stores.bell import call_in

W = TypeVar("W")


@dataclass(kw_only=True)
class Job(Generic[W]):
    """One operation that waits, and after it was done its answer or its error.

    Attributes:
        loop: Where its caller waits for ``future``; ``None`` for work that nobody waits for.
        undo: Makes the work that takes an answer back whose caller went away; ``None`` where it does no harm.
    """

    work: W
    loop: asyncio.AbstractEventLoop | None = None
    future: asyncio.Future[Any] | None = None
    undo: Callable[[Any], W] | None = None
    answer: Any = None
    error: Exception | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether its caller was cancelled."""
        return self.future is not None and self.future.cancelled()


def new_job(work: W, *, undo: Callable[[Any], W] | None = None) -> tuple[Job[W], asyncio.Future[Any]]:
    """A job of the running event loop, and the future that gets its answer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    return Job(work=work, loop=loop, future=future, undo=undo), future


def answer(jobs: Sequence[Job[W]], *, take_back: Callable[[Job[W]], None]) -> None:
    """Hand the answers over, one call into each event loop; ``take_back`` gets the jobs that nobody waits for."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Job[W]]] = defaultdict(list)
    for job in jobs:
        if job.loop is not None:
            by_loop[job.loop].append(job)
    for loop, done in by_loop.items():
        if not call_in(loop, partial(_deliver, done, take_back)):
            for job in done:
                take_back(job)


def _deliver(jobs: Sequence[Job[W]], take_back: Callable[[Job[W]], None]) -> None:
    """Runs in the callers' loop."""
    for job in jobs:
        if job.future is None or job.future.done():
            take_back(job)
        elif job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.answer)
