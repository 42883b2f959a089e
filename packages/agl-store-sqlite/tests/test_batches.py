"""The answer for each call in a batch reaches its caller, or the work is reverted if the caller is gone."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agl.errors import StoreError
from agl_store_sqlite.sql.batches import Batches


class Book:
    """Does a batch of work each time the test allows that, and notes the names of the work."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._came = threading.Semaphore(0)
        self._may = threading.Semaphore(0)

    def act(self, names: Sequence[str]) -> list[Any]:
        self._came.release()
        assert self._may.acquire(timeout=10)
        self.done += names
        return list(names)

    def wait(self) -> None:
        """Wait until a batch has arrived."""
        assert self._came.acquire(timeout=10)

    def allow(self, batches: int = 1) -> None:
        """Let the batch that has arrived be done, and ``batches - 1`` more."""
        self._may.release(batches)


def undo(name: str) -> str:
    return f"undo {name}"


@pytest.mark.parametrize(("turns", "is_reverted"), [(0, True), (1, True), (2, False)])
def test_work_is_reverted_if_its_caller_is_cancelled(turns: int, is_reverted: bool) -> None:
    """Cancelling comes before the answer is delivered, before the caller takes the answer, or too late."""
    book = Book()
    batches = Batches(book.act, shown_url="book://")

    async def body() -> Any:
        task = asyncio.create_task(batches.run("claim", undo=undo))
        for _ in range(2):  # the task starts, and hands its work over one turn later
            await asyncio.sleep(0)
        book.wait()
        batches.submit("next")
        book.allow()
        book.wait()  # the loop stands still until the thread has come to the next batch, and so sent the first answer
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    answer = asyncio.run(body())
    book.allow(2)
    batches.close()
    if is_reverted:
        assert isinstance(answer, asyncio.CancelledError)
        assert ["claim", "next", "undo claim"] == book.done
    else:
        assert answer == "claim"
        assert ["claim", "next"] == book.done


def test_work_of_tasks_that_wake_together_is_one_batch() -> None:
    sizes: list[int] = []

    def act(names: Sequence[str]) -> list[Any]:
        sizes.append(len(names))
        return list(names)

    batches = Batches(act, shown_url="book://")

    async def body() -> list[Any]:
        return await asyncio.gather(*map(batches.run, "abc"))

    assert ["a", "b", "c"] == asyncio.run(body())
    batches.close()
    assert [3] == sizes


def test_work_that_is_cancelled_before_it_is_handed_over_is_not_done() -> None:
    book = Book()
    batches = Batches(book.act, shown_url="book://")

    async def body() -> None:
        task = asyncio.create_task(batches.run("claim", undo=undo))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
    batches.close()
    assert [] == book.done


class BusyError(Exception):
    """Raised by a book that is in use."""


@pytest.mark.parametrize(
    ("failure", "tries"),
    [(ValueError, [["a", "b"], ["a"], ["b"]]), (BusyError, [["a", "b"]]), (StoreError, [["a", "b"]])],
)
def test_batch_is_done_again_one_by_one_unless_no_item_causes_the_failure(
    failure: type[Exception], tries: list[list[str]]
) -> None:
    done: list[list[str]] = []
    came, may = threading.Event(), threading.Event()

    def act(names: Sequence[str]) -> list[Any]:
        done.append(list(names))
        if names == ["first"]:
            came.set()
            assert may.wait(timeout=10)
            return ["first"]
        raise failure

    batches = Batches(act, shown_url="book://", is_shared=lambda error: isinstance(error, BusyError))
    batches.submit("first")
    assert came.wait(timeout=10)
    answers = [batches.submit(name) for name in "ab"]
    may.set()
    assert [failure, failure] == [type(answer.exception(timeout=10)) for answer in answers]
    assert [["first"], *tries] == done
    batches.close()


@pytest.mark.filterwarnings("ignore:coroutine")
def test_work_is_reverted_if_its_callers_loop_is_closed() -> None:
    book = Book()
    batches = Batches(book.act, shown_url="book://")
    loop = asyncio.new_event_loop()
    task = loop.create_task(batches.run("claim", undo=undo))
    for _ in range(2):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    book.wait()
    book.allow(2)
    book.wait()
    batches.close()
    assert ["claim", "undo claim"] == book.done
    assert not task.done()
