"""Remembers that the store does not answer, so that calls are served from cached data instead of waiting."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agl.contracts import Store
from agl.errors import ConflictError, FencedError, NotFoundError, StoreError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Seconds after which a read from the store counts as unanswered."""

_PROBE_S = 2.0

FINAL = (NotFoundError, ConflictError, FencedError)
"""Errors that are the answer of a working store, and so no sign of an outage."""


class Outage:
    """Tracks whether the store answers. Used in one event loop only.

    Args:
        is_watched: False without a spool: then nothing can be recorded during an outage, and reads simply wait for the
            store.

    Attributes:
        reason: The store's error at the last probe that failed.
    """

    def __init__(self, store: Store, *, is_watched: bool) -> None:
        self._store = store
        self._is_watched = is_watched
        self._since = 0.0
        self.reason = "no answer"
        self.begun = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """True during a known outage."""
        return self._since > 0.0

    def begin(self) -> None:
        """Record that the store has stopped answering."""
        if self._is_watched and not self.is_on:
            self._since = time.monotonic()
            _log.warning("the store does not answer; calls continue, and their records wait in the spool")
            self.begun.set()

    def end(self) -> None:
        """Record that the store answers again."""
        if self.is_on:
            _log.warning("the store answers again, after %.0f s", time.monotonic() - self._since)
            self._since = 0.0
            self.begun.clear()

    async def unless(self, read: Callable[[], Awaitable[T]], otherwise: Callable[[], T]) -> T:
        """Return the result of ``read``, or ``otherwise()`` if the store does not answer.

        Errors in :data:`FINAL`, such as :class:`~agl.errors.NotFoundError`, pass through.
        """
        if not self._is_watched:
            return await read()
        if self.is_on:
            return otherwise()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await read()
        except FINAL:
            raise
        except (StoreError, TimeoutError):
            if not await self.is_over():
                return otherwise()
            return await read()

    async def is_over(self) -> bool:
        """Probe the store and record the result; returns true if the store answers."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._store.cursor()
        except (StoreError, TimeoutError) as error:
            self.reason = str(error) or f"no answer within {_PROBE_S:g} s"
            self.begin()
            return False
        self.end()
        return True
