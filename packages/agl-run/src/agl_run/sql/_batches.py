"""Batches database work in threads of the store, and returns answers to the callers' event loops."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from agl.errors import AglError, StoreError
from agl.stores import Tables, Work, closed

W = TypeVar("W")
Job: TypeAlias = tuple[W, "Future[Any]"]


class Batches(Generic[W]):
    """Does work in threads: waiting items form a batch, and run one by one if the batch fails.

    Args:
        act: Does a batch in a transaction; returns the answers, with an exception for each refused item. An exception
            that it raises undoes the whole batch.
        shown_url: Names the store in the error of calls after the close.
        threads: Batches done at once; a writer has one.
        explain: Converts an exception of ``act`` into the one that the caller gets.
    """

    def __init__(
        self,
        act: Callable[[Sequence[W]], Sequence[Any]],
        *,
        shown_url: str,
        threads: int = 1,
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self._act, self._explain, self._shown_url = act, explain, shown_url
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="agl-store")
        self._waiting: deque[Job[W]] = deque()
        self._lock = threading.Lock()
        self._is_called = False
        self.is_closed = False

    async def run(self, work: W, *, undo: Callable[[Any], W] | None = None) -> Any:
        """Do ``work`` and return its answer; ``undo`` makes the work that reverts it if the caller is cancelled."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None and not future.cancel():
                future.add_done_callback(partial(self._take_back, undo))
            raise

    def submit(self, work: W) -> "Future[Any]":
        """Queue work; raises :class:`~agl.errors.StoreError` after the close."""
        future: Future[Any] = Future()
        with self._lock:
            if self.is_closed:
                raise closed(self._shown_url)
            self._waiting.append((work, future))
            if not self._is_called:
                self._is_called = True
                self._executor.submit(self._work)
        return future

    def close(self) -> None:
        """Finish the queued work and end the threads. Blocks; idempotent."""
        with self._lock:
            self.is_closed = True
        self._executor.shutdown(wait=True)

    def _work(self) -> None:
        """Run in a thread until the queue is empty; further work may start another thread, up to ``threads``."""
        while batch := self._take():
            if jobs := [job for job in batch if job[1].set_running_or_notify_cancel()]:
                self._do(jobs)

    def _take(self) -> list[Job[W]]:
        with self._lock:
            self._is_called = False
            return [self._waiting.popleft() for _ in range(min(256, len(self._waiting)))]

    def _do(self, jobs: Sequence[Job[W]]) -> None:
        try:
            answers = self._act([work for work, _ in jobs])
        except Exception as error:  # noqa: BLE001  # the threads outlive every failure, and each caller gets the error
            if len(jobs) > 1 and not isinstance(error, StoreError):
                for job in jobs:
                    self._do([job])
                return
            answers = [self._explain(error)] * len(jobs)
        for (_, future), answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _take_back(self, undo: Callable[[Any], W], done: "Future[Any]") -> None:
        with suppress(Exception):  # leases cover what failed or can no longer be reverted
            if answer := done.result():
                self.submit(undo(answer))


def perform(works: Iterable[Work[Any]], tables: Tables) -> list[Any]:
    """Do operations in one transaction; the answer of a refused one is its :class:`AglError`, the others stand."""
    answers: list[Any] = []
    for work in works:
        try:
            answers.append(work.do(tables))
        except AglError as error:
            answers.append(error)
    return answers
