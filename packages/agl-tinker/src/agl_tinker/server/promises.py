"""The results for which clients wait: work starts when a request arrives, and its result is fetched by an id.

If a client repeats a request because the response was lost, it gets the same promise again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from agl.errors import AglError
from agl_tinker.server.problems import RefusedError
from agl_tinker.server.wire import failure

_LOG = logging.getLogger("agl_tinker")
Result = bytes | Mapping[str, Any]
"""The body of a result: a protocol buffer as bytes, or JSON."""

POLL_S = 20.0
"""Seconds that the server waits before it answers that a result is not ready; the published client waits for 45."""

_KEPT_S = 900.0
"""Seconds for which a result is kept after it is ready."""


@dataclass
class _Promise:
    task: asyncio.Task[Result]
    done_at: float | None = None


class Promises:
    """Work in progress and its results; must be used in one event loop."""

    def __init__(self) -> None:
        self._promises: dict[str, _Promise] = {}

    def has(self, request_id: str) -> bool:
        """Return true if there is a promise for the request."""
        return request_id in self._promises

    def make(self, request_id: str, work: Awaitable[Result]) -> None:
        """Start ``work``; :meth:`wait` returns the result under ``request_id``."""
        self._forget()
        promise = _Promise(asyncio.ensure_future(_settled(work)))
        promise.task.add_done_callback(lambda _: setattr(promise, "done_at", time.monotonic()))
        self._promises[request_id] = promise

    async def wait(self, request_id: str) -> Result | None:
        """Return a result, or ``None`` if it is not ready yet; raises :class:`RefusedError` for an unknown id."""
        promise = self._promises.get(request_id)
        if promise is None:
            raise RefusedError(
                f"The request {request_id[:200]!r} is not known here: its result was kept for {_KEPT_S / 60:g} "
                "minutes, or the server was started again since.",
                status=410,
            )
        done, _ = await asyncio.wait([promise.task], timeout=POLL_S)
        return promise.task.result() if done else None

    def cancel(self, request_id: str) -> None:
        """Stop work whose result is no longer needed; an unknown id is ignored."""
        promise = self._promises.get(request_id)
        if promise is not None:
            promise.task.cancel()

    async def close(self) -> None:
        """Stop all work."""
        for promise in self._promises.values():
            promise.task.cancel()
        await asyncio.gather(*(promise.task for promise in self._promises.values()), return_exceptions=True)

    def _forget(self) -> None:
        until = time.monotonic() - _KEPT_S
        old = [key for key, one in self._promises.items() if one.done_at is not None and one.done_at < until]
        for key in old:
            del self._promises[key]


async def _settled(work: Awaitable[Result]) -> Result:
    """Await work and return its result; an error becomes a result that reports the failure."""
    try:
        return await work
    except asyncio.CancelledError:
        return failure("The request was cancelled.", is_user=True)
    except RefusedError as error:
        return failure(str(error), is_user=True)
    except AglError as error:
        return failure(str(error), is_user=True)
    except Exception as error:  # noqa: BLE001 - isolation point: one request's failure is that request's result
        _LOG.exception("a request failed")
        return failure(f"{type(error).__name__}: {error}.", is_user=False)
