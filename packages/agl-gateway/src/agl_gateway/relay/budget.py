"""Bounds the bytes of all large requests that the gateway holds at once; further ones wait for their turn."""

import asyncio
from collections import deque

from agl_gateway.wire.problems import Problem

_RETRY_AFTER_S = 5


class ByteBudget:
    """Bytes to hold, granted in the order of the requests. Used in one event loop only.

    Args:
        limit: Bytes that may be held at once.
        wait_s: Seconds that a request waits for its bytes.
    """

    def __init__(self, *, limit: int, wait_s: float) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.held = 0

    async def take(self, size: int) -> int:
        """Wait until ``size`` bytes may be held, or the whole budget if that is less; returns the number.

        Raises:
            Problem: 503 with ``Retry-After`` when the time is over.
        """
        size = min(size, self._limit)
        if not self._waiting and self.held + size <= self._limit:
            self.held += size
            return size
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
        except BaseException as error:
            self._withdraw(size, granted)
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise
        return size

    def give(self, size: int) -> None:
        """Give bytes back, for those who wait."""
        self.held -= size
        while self._waiting and self.held + self._waiting[0][0] <= self._limit:
            wanted, granted = self._waiting.popleft()
            if not granted.done():
                self.held += wanted
                granted.set_result(None)

    def _withdraw(self, size: int, granted: "asyncio.Future[None]") -> None:
        if granted.done() and not granted.cancelled():
            self.give(size)
        else:
            self._waiting = deque(item for item in self._waiting if item[1] is not granted)
            self.give(0)

    def _refusal(self) -> Problem:
        return Problem(
            503,
            f"large requests hold {self.held} of {self._limit} bytes that the gateway keeps for them; send fewer at "
            "once, or smaller ones, or try again later",
            code="overloaded",
            is_retryable=True,
            retry_after_s=_RETRY_AFTER_S,
        )
