"""Batches database work in threads of the store, and returns answers to the callers' event loops."""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeAlias, TypeVar

from agl.errors import AglError, StoreError
from agl.stores import Reads, Tables, Work, closed

W = TypeVar("W")
Look: TypeAlias = Callable[[Reads], Any]
"""A read: it looks into the tables and returns an answer."""


class OverdueError(Exception):
    """Raised instead of answering a read while an overdue attempt is undecided; the writer must decide it first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job(Generic[W]):
    """One item of work; its caller waits in the event loop ``loop``, or in a thread if ``loop`` is ``None``."""

    work: W
    future: "asyncio.Future[Any] | Future[Any]"
    loop: asyncio.AbstractEventLoop | None = None
    undo: Callable[[Any], W] | None = None


class Batches(Generic[W]):
    """Runs work in threads. Waiting items form a batch; if a batch fails, its items are retried one by one.

    Args:
        act: Runs a batch in a transaction; returns the answers, with an exception for each refused item. If ``act``
            raises, the whole batch is undone.
        shown_url: The store's name in the error for calls after the close.
        threads: Number of batches that run at once; a writer has one.
        gather_s: Seconds for which a batch waits if fewer items wait than the last one had, because callers that were
            answered together ask again together.
        explain: Converts an exception of ``act`` into the exception that callers get.
        is_shared: Returns true for an exception of ``act`` that is due to no single item, such as a timeout while
            waiting for a lock. All callers of the batch get such an exception, or a :class:`~agl.errors.StoreError`,
            without a retry.
    """

    def __init__(
        self,
        act: Callable[[Sequence[W]], Sequence[Any]],
        *,
        shown_url: str,
        threads: int = 1,
        gather_s: float = 0.0,
        explain: Callable[[Exception], Exception] = lambda error: error,
        is_shared: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        self._act, self._explain, self._is_shared, self._shown_url = act, explain, is_shared, shown_url
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="agl-store")
        self._waiting: deque[_Job[W]] = deque()
        self._gather_s, self._last = gather_s, 1
        self._lock = threading.Lock()
        self._is_called = False
        self.is_closed = False

    async def run(self, work: W, *, undo: Callable[[Any], W] | None = None) -> Any:
        """Do ``work`` and return its answer; if the caller is cancelled, the work that ``undo`` returns reverts it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        job = _Job(work=work, future=future, loop=loop, undo=undo)
        self._put(job)
        try:
            await asyncio.sleep(0)  # other tasks of the loop add their work to the batch
            self._call()
            return await future
        except asyncio.CancelledError:
            is_cancelled = future.cancel() or future.cancelled()
            if not is_cancelled and future.exception() is None:  # answered just before the cancellation
                self._take_back(job, future.result())
            raise

    def submit(self, work: W) -> "Future[Any]":
        """Queue work; raises :class:`~agl.errors.StoreError` after the close."""
        future: Future[Any] = Future()
        self._put(_Job(work=work, future=future))
        self._call()
        return future

    def _put(self, job: _Job[W]) -> None:
        with self._lock:
            if self.is_closed:
                raise closed(self._shown_url)
            self._waiting.append(job)

    def _call(self) -> None:
        """Let a thread do the waiting work; does nothing if a thread is about to take it."""
        with self._lock:
            if not self.is_closed:
                self._call_thread()

    def _call_thread(self) -> None:
        if self._waiting and not self._is_called:
            self._is_called = True
            self._executor.submit(self._work)

    def close(self) -> None:
        """Finish the queued work and end the threads. Blocks; idempotent."""
        with self._lock:
            self.is_closed = True
            self._call_thread()  # the last one, which works until the queue is empty
        self._executor.shutdown(wait=True)

    def _work(self) -> None:
        """Run in a thread until the queue is empty; further work may start another thread, up to ``threads``."""
        while batch := self._take():
            if jobs := [job for job in batch if not job.future.cancelled()]:
                self._do(jobs)

    def _take(self) -> list[_Job[W]]:
        if self._gather_s and 0 < len(self._waiting) < self._last:
            time.sleep(self._gather_s)
        with self._lock:
            self._is_called = False
            batch = [self._waiting.popleft() for _ in range(min(256, len(self._waiting)))]
        self._last = len(batch) or self._last
        return batch

    def _do(self, jobs: Sequence[_Job[W]]) -> None:
        try:
            answers = self._act([job.work for job in jobs])
        except Exception as error:  # noqa: BLE001  # the threads outlive every failure, and each caller gets the error
            if len(jobs) > 1 and not isinstance(error, StoreError) and not self._is_shared(error):
                for job in jobs:
                    self._do([job])
                return
            answers = [self._explain(error)] * len(jobs)
        by_loop: defaultdict[asyncio.AbstractEventLoop | None, list[tuple[_Job[W], Any]]] = defaultdict(list)
        for job, answer in zip(jobs, answers, strict=True):
            by_loop[job.loop].append((job, answer))
        for loop, answered in by_loop.items():
            self._hand_over(loop, answered)

    def _hand_over(self, loop: asyncio.AbstractEventLoop | None, answered: list[tuple[_Job[W], Any]]) -> None:
        """Deliver answers in the callers' event loop by one wake-up, so that their next requests form a batch again."""
        if loop is None:
            self._deliver(answered)
            return
        try:
            loop.call_soon_threadsafe(self._deliver, answered)
        except RuntimeError:  # the loop is closed, and its callers are gone
            for job, answer in answered:
                self._take_back(job, answer)

    def _deliver(self, answered: list[tuple[_Job[W], Any]]) -> None:
        for job, answer in answered:
            if job.future.cancelled():
                self._take_back(job, answer)
            elif isinstance(answer, Exception):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer)

    def _take_back(self, job: _Job[W], answer: Any) -> None:
        """Revert work whose caller is gone; in a closed store, claimed attempts are freed when their leases end."""
        if job.undo is not None and answer and not isinstance(answer, Exception):
            with suppress(StoreError):  # the store is closed
                self.submit(job.undo(answer))


def answer_to(look: Look, reads: Reads) -> Any:
    """Return the answer of a read, or the :class:`AglError` that refuses it."""
    try:
        return look(reads)
    except AglError as error:
        return error


def perform(works: Iterable[Work[Any]], tables: Tables) -> list[Any]:
    """Do operations in one transaction; a refused one is answered with its :class:`AglError`, and the others go on."""
    answers: list[Any] = []
    for act, group in groupby(works, key=lambda work: work.act):
        alike = list(group)
        together = _do_together(alike, tables) if act.__name__ in _JOINED and len(alike) > 1 else None
        answers += together or [_answer_of(work, tables) for work in alike]
    return answers


def _answer_of(work: Work[Any], tables: Tables) -> Any:
    try:
        return work.do(tables)
    except AglError as error:
        return error


_JOINED = ("finish", "append_spans")
"""Operations on lists; what several callers send can be written by one of them."""


def _do_together(works: Sequence[Work[Any]], tables: Tables) -> list[Any] | None:
    """Write the lists of several callers by one operation; ``None`` if it is refused, and has changed nothing."""
    parts: list[Sequence[Any]] = [(*work.args, *work.kwargs.values())[0] for work in works]
    try:
        answers: Sequence[Any] | None = works[0].act(tables, [each for part in parts for each in part])
    except AglError:
        return None
    left = iter(answers or ())
    return [answers and [next(left) for _ in part] for part in parts]
