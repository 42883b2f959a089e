"""Holds the calls of a policy while its weights change, and balances the calls over the policy's servers.

Every relay in front of model servers uses these two classes; each relay ranks the servers by its own rule.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

__all__ = ["FEW", "CallGate", "ServerLoad"]

REST_S = 5.0
"""Seconds for which a server is ranked last after a failure."""

SLACK = 1.25
"""A server is busy once its calls in flight reach this multiple of the mean over all servers."""

FEW = 4
"""A server with fewer calls in flight than this is never busy, however idle the other servers are."""


class CallGate:
    """Passes or holds the calls of one policy. Used in one event loop only.

    Attributes:
        model: The servers' name for the weights; ``""`` if the policy's first name stays.
        model_version: The version that serves the calls; ``""`` if only the servers' answers name it.
        in_flight: The number of calls that were let through and have not ended.
        held: The number of calls that wait.
        total: The number of calls that were let through.
    """

    def __init__(self, *, model: str = "", model_version: str = "") -> None:
        self.model = model
        self.model_version = model_version
        self.in_flight = 0
        self.held = 0
        self.total = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def passed(self) -> AsyncGenerator[str]:
        """Wait until calls may pass; yields the model version that then serves, and counts the call as in flight."""
        self.held += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self.held -= 1
        self.in_flight += 1
        self.total += 1
        self._idle.clear()
        try:
            yield self.model_version
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def close(self) -> None:
        """Hold new calls; idempotent."""
        self._open.clear()

    async def pause(self, *, drain_s: float | None = None) -> bool:
        """Hold new calls and wait for calls in flight, up to ``drain_s`` seconds; returns true if all of them ended."""
        self.close()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def resume(self, *, model_version: str = "", model: str = "") -> None:
        """Let calls pass again; a non-empty ``model_version`` or ``model`` applies to all calls from now on."""
        self.model_version = model_version or self.model_version
        self.model = model or self.model
        self._open.set()


class ServerLoad:
    """Counts the calls in flight at servers, and remembers which servers failed. Used in one event loop only.

    A busy server passes calls on, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
    arXiv 1608.01350). Each relay counts only its own calls.

    Attributes:
        in_flight: The number of calls in flight at each server, by URL.
        failures: The number of times that each server failed, by URL.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed_at: dict[str, float] = {}
        self.in_flight: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def failed(self, url: str) -> None:
        """Record that a server did not answer; it rests for 5 seconds."""
        self._failed_at[url] = self._clock()
        self.failures[url] += 1

    def is_resting(self, url: str) -> bool:
        """Return true if the server failed less than 5 seconds ago."""
        return self._clock() - self._failed_at.get(url, -math.inf) < REST_S

    def busy(self, urls: Sequence[str]) -> set[str]:
        """Return the servers that have at least 1.25 times the mean number of calls in flight, and at least four."""
        mean = (sum(self.in_flight[url] for url in urls) + 1) / len(urls)
        bound = max(FEW, math.ceil(SLACK * mean))
        return {url for url in urls if self.in_flight[url] >= bound}
