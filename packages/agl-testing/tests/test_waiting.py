"""Waiting for a condition, with and without an event loop."""

import asyncio
from collections.abc import Callable

import pytest

from agl_testing.waiting import eventually, wait_until


def countdown(*values: object) -> Callable[[], object]:
    """Return a function that gives the values in turn, and then the last one forever."""
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_wait_until_returns_the_first_true_value() -> None:
    assert "third" == wait_until(countdown(None, 0, "third", "fourth"), every_s=0.0)


def test_wait_until_gives_up_and_shows_the_last_value() -> None:
    with pytest.raises(AssertionError, match=r"still \[\] after 0 s"):
        wait_until(countdown([]), within_s=0.0)


def test_eventually_takes_plain_and_awaitable_conditions() -> None:
    async def body() -> list[object]:
        plain, awaited = countdown(False, 1), countdown(0, 2)

        async def later() -> object:
            return awaited()

        return [await eventually(plain, every_s=0.0), await eventually(later, every_s=0.0)]

    assert [1, 2] == asyncio.run(body())


def test_eventually_lets_the_loop_go_on() -> None:
    async def body() -> bool:
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        return await eventually(event.is_set, within_s=10.0)

    assert asyncio.run(body())


def test_eventually_gives_up_and_shows_the_last_value() -> None:
    with pytest.raises(AssertionError, match="still False after 0 s"):
        asyncio.run(eventually(countdown(False), within_s=0.0))
