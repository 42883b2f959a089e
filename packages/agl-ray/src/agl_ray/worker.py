"""The actor that runs attempts: the loop of ``agl worker``, in a thread and an event loop of its own.

Ray's own calls to the actor are answered in other threads, so that an agent that blocks its event loop does not keep
the actor from being asked or stopped. No method of the actor is a coroutine, because Ray would then run all of them on
one event loop.
"""

import asyncio
import contextlib
import logging
import threading
from typing import Any

from agl_ray.cluster import ray
from agl_run.fleets import OrderedWorker, WorkerOrder

_LOG = logging.getLogger("agl_ray")


class WorkerActor:
    """Runs attempts of an experiment in a process that Ray placed.

    Args:
        order: The experiment.
    """

    def __init__(self, order: WorkerOrder) -> None:
        again = bool(ray().get_runtime_context().was_current_actor_reconstructed)
        self._worker = OrderedWorker(order, tell=_tell, reclaims=again)
        self._runs = threading.Lock()
        self._stopping = _Stopping()

    def run(self) -> dict[str, int]:
        """Run attempts until the experiment is finished or the actor is stopped; returns counts by status."""
        with self._runs:
            return asyncio.run(self._stopping.until(self._worker))

    def held(self) -> int:
        """Return the number of attempts that it holds."""
        return self._worker.held

    def stop(self) -> None:
        """Give running attempts back, and return once that is done."""
        self._stopping.stop()
        with self._runs:
            return


class _Stopping:
    """Runs a worker until another thread stops it."""

    def __init__(self) -> None:
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[dict[str, int]] | None = None

    async def until(self, worker: OrderedWorker) -> dict[str, int]:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(worker.run())
        if self._is_stopped:
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await self._task
        return {}

    def stop(self) -> None:
        self._is_stopped = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._task.cancel)


def _tell(event: str, text: str, **values: Any) -> None:
    """Write an event to the actor's log, which Ray keeps."""
    _LOG.info("%s: %s %s", event, text, values or "")
