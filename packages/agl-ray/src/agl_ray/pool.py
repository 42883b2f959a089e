"""Maintains as many workers as the queue needs, between two bounds.

Ray restarts a worker whose process died; all other starts and stops are decided here. A worker is stopped when it is
not needed for the queue and has held no attempt for a while.

In each worker's process an actor runs the loop of ``agl worker`` in a separate thread with an event loop. Ray's calls
to the actor run in other threads, so that the actor can be asked and stopped even while an agent blocks the event loop.
The actor's methods are not coroutines, because Ray would then run all of them on one event loop.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from agl.errors import AglError, ConfigError, StoreError
from agl_ray.cluster import Cluster, ClusterGoneError, ProcessGoneError, answer_of, ray
from agl_ray.layout import Share
from agl_ray.reservation import Patience, Place, Reservation, options_of
from agl_run.fleets import FleetSetup, OrderedWorker, WorkerOrder

_LOG = logging.getLogger("agl_ray")


class WorkerActor:
    """Runs attempts of an experiment in a process that Ray placed.

    Args:
        order: The experiment to work for.
    """

    def __init__(self, order: WorkerOrder) -> None:
        again = bool(ray().get_runtime_context().was_current_actor_reconstructed)
        self._worker = OrderedWorker(order, tell=_tell, reclaims=again)
        self._runs = threading.Lock()
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[dict[str, int]] | None = None

    def run(self) -> dict[str, int]:
        """Run attempts until the experiment is finished or :meth:`stop` is called; return rollout counts by status."""

        async def until_stopped() -> dict[str, int]:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(self._worker.run())
            if self._is_stopped:
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return await self._task
            return {}

        with self._runs:
            return asyncio.run(until_stopped())

    def held(self) -> int:
        """Return the number of attempts that the worker holds."""
        return self._worker.held

    def stop(self) -> None:
        """Give running attempts back; return when that is done."""
        self._is_stopped = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        with self._runs:
            return


def _tell(event: str, text: str, **values: Any) -> None:
    """Write an event to the actor's log, which Ray stores."""
    _LOG.info("%s: %s %s", event, text, values or "")


LOOK_S = 1.0
"""Seconds between two reads of the queue."""

STOP_S = 10.0
"""Seconds that a worker may take to give its attempts back before it is killed."""

SLOW_S = 60.0
"""Seconds after which a worker that has not started is reported."""

_ANSWERS = 4
"""Number of calls that an actor answers at once: the worker's loop, and questions while it runs."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The bounds of a pool, and the share of each worker.

    Attributes:
        share: The cluster share of each worker.
        at_once: Attempts at once in each worker.
        fewest: Workers that are kept even without work.
        most: The most workers.
        idle_s: Seconds without an attempt after which a worker is stopped.
        wait_s: Seconds that each try to reserve room for a worker may take.
    """

    share: Share
    at_once: int
    fewest: int
    most: int
    idle_s: float
    wait_s: float


@dataclass(kw_only=True, eq=False)
class _Placed:
    """A worker of the pool."""

    actor: Any
    run: "asyncio.Task[dict[str, int]]"
    ready: "asyncio.Task[int]"
    asked_at: float = field(default_factory=time.monotonic)
    busy_at: float = field(default_factory=time.monotonic)
    room: Reservation | None = None
    is_slow: bool = False

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None


class Pool:
    """Starts and stops the workers of one experiment.

    Args:
        cluster: The connection to the cluster.
        settings: The bounds of the pool.
        setup: The experiment.
        room: The reservation for the first worker; ``None`` to make one when it is needed.
    """

    def __init__(
        self, cluster: Cluster, settings: PoolSettings, setup: FleetSetup, *, room: Reservation | None
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._setup = setup
        self._workers: list[_Placed] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._said = -1
        self._room = room
        self._is_crowded = False

    def start(self) -> None:
        """Begin to watch the queue and the cluster."""
        self._keeper = asyncio.create_task(self._keep())
        self._watch = asyncio.create_task(self._look_for_cluster())

    async def stop(self) -> None:
        """Stop all workers; they give their attempts back."""
        tasks = [task for task in (self._keeper, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in list(self._workers):
            self._dismiss(worker)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._room is not None:
            await self._room.release()

    async def _keep(self) -> None:
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        except Exception as error:  # noqa: BLE001  # raised for the waiters of rollouts
            self._setup.fail(error)

    async def _look_for_cluster(self) -> None:
        try:
            await self._cluster.until_gone()
        except ClusterGoneError as error:
            self._setup.fail(error)

    async def _look(self) -> None:
        self._remove_ended()
        try:
            rollouts = await self._setup.open_rollouts()
        except StoreError as error:
            _LOG.warning("the queue could not be read: %s", error)
            return
        bounds = self._settings
        wanted = max(bounds.fewest, min(bounds.most, math.ceil(rollouts / bounds.at_once)))
        if wanted and not self._workers:
            await self._add_first()
        while self._workers and len(self._workers) < wanted:
            await self._add(None)
        await self._dismiss_idle(beyond=wanted)
        self._mention_slow()
        self._tell(len(self._workers))

    def _tell(self, count: int) -> None:
        if count != self._said:
            self._said = count
            self._setup.say(f"{count} worker{'' if count == 1 else 's'} on the Ray cluster")

    def _remove_ended(self) -> None:
        """Dismiss workers whose loop has ended; an error of the loop ends the experiment."""
        for worker in [one for one in self._workers if one.run.done()]:
            self._dismiss(worker)
            error = worker.run.exception()
            if isinstance(error, ProcessGoneError):
                raise AglError(_why_gone(error)) from error
            if error is not None:
                raise error

    async def _add_first(self) -> None:
        """Add the first worker on reserved room; without room in the cluster, add none."""
        room, self._room = self._room or await self._find_room(), None
        if room is not None:
            await self._add(room)

    async def _find_room(self) -> Reservation | None:
        """Reserve room for a worker; return ``None`` while there is no room, which is reported once."""
        room = Reservation(self._cluster, Patience(self._settings.wait_s))
        try:
            await room.make([self._settings.share])
        except ConfigError:
            await room.release()
            if not self._is_crowded:
                self._setup.say("the Ray cluster has no room for a worker at present; waiting until others end")
            self._is_crowded = True
            return None
        except asyncio.CancelledError:
            await room.release()
            raise
        self._is_crowded = False
        return room

    async def _add(self, room: Reservation | None) -> None:
        place = None if room is None else room.place_of(self._settings.share.name)
        making = asyncio.ensure_future(self._cluster.run(lambda: self._make(place)))
        try:
            actor = await asyncio.shield(making)
        except asyncio.CancelledError:
            self._dismiss(self._take(await making, room))
            raise
        self._take(actor, room)

    def _take(self, actor: Any, room: Reservation | None) -> _Placed:
        run, ready = answer_of(actor.run.remote()), answer_of(actor.held.remote())
        worker = _Placed(actor=actor, run=asyncio.ensure_future(run), ready=asyncio.ensure_future(ready), room=room)
        self._workers.append(worker)
        return worker

    def _make(self, place: Place | None) -> Any:
        amounts = self._settings.share.amounts
        spread = "SPREAD" if self._settings.share.strategy == "SPREAD" else "DEFAULT"
        kind = ray().remote(WorkerActor)
        return kind.options(
            **options_of(amounts),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_ANSWERS,
            scheduling_strategy=spread if place is None else place.strategy(),
        ).remote(self._setup.order.for_worker())

    async def _dismiss_idle(self, *, beyond: int) -> None:
        """Stop idle workers in excess of ``beyond``; a worker is idle if it has held no attempt for a while."""
        surplus = len(self._workers) - beyond
        workers = self._workers[::-1]
        held = [True] * len(workers) if surplus <= 0 else await asyncio.gather(*(self._holds(one) for one in workers))
        for worker, is_held in zip(workers, held, strict=True):
            if is_held:
                worker.busy_at = time.monotonic()
            elif surplus > 0 and time.monotonic() - worker.busy_at >= self._settings.idle_s:
                surplus -= 1
                self._dismiss(worker)

    async def _holds(self, worker: _Placed) -> bool:
        if not worker.is_ready:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                return await answer_of(worker.actor.held.remote()) > 0
        except (TimeoutError, AglError):
            return True  # assume so if there is no answer

    def _dismiss(self, worker: _Placed) -> None:
        self._workers.remove(worker)
        task = asyncio.create_task(self._end(worker))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _end(self, worker: _Placed) -> None:
        """Let a worker give its attempts back, then end the process, even if the worker does not answer."""
        if worker.is_ready:
            with contextlib.suppress(TimeoutError, AglError):
                async with asyncio.timeout(STOP_S):
                    await answer_of(worker.actor.stop.remote())
        with contextlib.suppress(Exception):  # the actor may be gone
            await self._cluster.run(lambda: ray().kill(worker.actor, no_restart=True))
        if worker.room is not None:
            await worker.room.release()
        for task in (worker.run, worker.ready):
            task.cancel()
        await asyncio.gather(worker.run, worker.ready, return_exceptions=True)

    def _mention_slow(self) -> None:
        for worker in self._workers:
            if not worker.is_ready and not worker.is_slow and time.monotonic() - worker.asked_at > SLOW_S:
                worker.is_slow = True
                self._setup.say(f"a worker has not started after {SLOW_S:.0f} s; ray status shows what Ray waits for")


def _why_gone(error: ProcessGoneError) -> str:
    """Explain why Ray could not restart a worker."""
    if "its owner has died" in str(error):
        return (
            f"this machine is no longer a node of the Ray cluster, which therefore ended the workers: {error} Every "
            "finished step is kept; start Ray here again (ray start) and continue with --resume (resume=True)"
        )
    return (
        f"a worker on the Ray cluster cannot run: {error} Every machine of the cluster needs agl-ray, the agent and "
        "what it imports, in the same releases and at the same place as here"
    )
