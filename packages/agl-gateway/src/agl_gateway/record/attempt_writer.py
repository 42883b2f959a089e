"""Writes the spans of single attempts where the store refused those of many at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from agl.contracts import Store
from agl.errors import ConflictError, FencedError, NotFoundError, StoreError
from agl.schemas import Span
from agl_gateway.record.storable import storable
from agl_gateway.status.metrics import SpanRate

_log = logging.getLogger(__name__)

_RETRY_DELAYS_S = (0.05, 0.2, 1.0, 3.0)
_FINAL = (NotFoundError, ConflictError, FencedError)
"""Refusals that another try does not change."""


class AttemptWriter:
    """Writes spans; an attempt's trouble delays no other attempt. Used in one event loop only.

    Args:
        on_failure: Takes attempt, message and number of spans that could not be written.
    """

    def __init__(self, store: Store, *, rate: SpanRate, on_failure: Callable[[str, str, int], None]) -> None:
        self._store = store
        self._rate = rate
        self._on_failure = on_failure
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def is_behind(self, attempt_id: str) -> bool:
        """Return true while earlier spans of the attempt wait for another try."""
        return attempt_id in self._tasks

    def write(self, attempt_id: str, spans: Sequence[Span], *, then: Callable[[], Awaitable[None]]) -> None:
        """Write an attempt's spans in a task, after its earlier ones; calls ``then`` when they are stored or lost."""
        task = asyncio.create_task(self._write(attempt_id, spans, self._tasks.get(attempt_id), then))
        self._tasks[attempt_id] = task
        task.add_done_callback(lambda done: self._forget(attempt_id, done))

    async def stop(self) -> None:
        """Wait for all tries to end."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _forget(self, attempt_id: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(attempt_id) is done:
            del self._tasks[attempt_id]

    async def _write(
        self,
        attempt_id: str,
        spans: Sequence[Span],
        after: asyncio.Task[None] | None,
        then: Callable[[], Awaitable[None]],
    ) -> None:
        if after is not None:
            await asyncio.wait([after])
        error = await self._try([storable(span) for span in spans])
        if error is not None:
            message = str(error) if isinstance(error, StoreError) else repr(error)
            _log.error("the store refused %d spans of attempt %s: %s", len(spans), attempt_id, message)
            self._on_failure(attempt_id, message, len(spans))
        await then()

    async def _try(self, spans: Sequence[Span]) -> Exception | None:
        """Append the spans, with pauses between tries; returns the last error."""
        found: Exception | None = None
        for delay_s in (0.0, *_RETRY_DELAYS_S):
            await asyncio.sleep(delay_s)
            try:
                await self._store.append_spans(spans)
            except Exception as error:  # noqa: BLE001  # isolation: the caller reports it
                found = error
                if isinstance(error, _FINAL):
                    return found
            else:
                self._rate.add(len(spans))
                return None
        return found
