"""Steps that wait to be saved, and how a run ends that has some.

An algorithm that writes much may let its steps wait (``defer`` of its context). They are then done in this process
only: the store keeps their rollouts and metrics at once, and their state, ledger and live versions together with those
of the step that is saved next. A run that is killed goes on from the last saved step and repeats the others with the
rollouts that they had collected, so none is trained twice into weights that are still there, and none is paid for
twice.

A version that was published and not saved is in the store, because rollouts name it, and has no files. What says so is
in the store as well, see :func:`unsaved`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Rollout
from agl.stores import read_recordings
from agl_inspect.records.state import DEFERRED, AlgorithmState
from agl_inspect.records.workers import worker_is_dead

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

SaveFn = Callable[[bool], Awaitable[bool]]
"""Saves an algorithm's steps; see ``defer`` of :class:`agl.contracts.AlgorithmContext`."""


_PAGE = 1000


async def to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even if this is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        # The shield lets the cancellation arrive here while the work goes on.
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # ``wait`` does not raise the task's error; the cancellation stays the reason that the
        # caller sees.
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen: the cancellation says why this ends
        raise


class Collecting:
    """Ends an algorithm's waiting for rollouts, during which it changes nothing, and leaves an update alone.

    Rollouts may be collected by tasks that go on while an algorithm updates. Such a task ends, and the update does not
    see it.
    """

    def __init__(self) -> None:
        self._tasks: Counter[asyncio.Task[Any] | None] = Counter()
        self._is_over = False

    @property
    def is_under_way(self) -> bool:
        """True while rollouts are collected, which a step waits for or will take later."""
        return self._tasks.total() > 0

    def stop(self) -> None:
        """Cancel what collects, and whatever is to collect from now on: the run stops."""
        # Set first: a task that is cancelled below may try to collect again from an ``except`` of
        # its own.
        self._is_over = True
        for task in [task for task, count in self._tasks.items() if task is not None and count]:
            task.cancel()

    def watched(self, call: F) -> F:
        """Wrap a coroutine function that collects."""

        async def collect(*args: Any, **kwargs: Any) -> Any:
            if self._is_over:
                raise asyncio.CancelledError
            task = asyncio.current_task()
            self._tasks[task] += 1
            try:
                return await call(*args, **kwargs)
            finally:
                self._tasks[task] -= 1
                self._tasks += Counter()  # forgets tasks that have ended

        return cast("F", collect)


async def remove_unreachable(store: Store, experiment: str, states: Mapping[str, AlgorithmState]) -> int:
    """Remove the unfinished rollouts that are pinned to versions of steps which were not saved; returns their number.

    They would run with other versions, because these are not live any more. The repeated steps ask for them again, and
    their attempts get the same ids again. So a rollout stays, and goes on with the live versions, if a worker that may
    not have ended has tried it: that worker could still write to it.
    """
    # Each version is looked up once; the rollouts of a step share a few of them.
    lost: dict[tuple[str, str], bool] = {}
    gone: list[str] = []
    query = RolloutQuery(experiment=experiment, status=("queued", "running"), limit=_PAGE)
    async for recording in read_recordings(store, query, spans="none"):
        for version in recording.rollout.resources.items():
            if version not in lost:
                lost[version] = await _is_lost(store, version, states)
        # Only a worker of this machine can be known to have ended; one elsewhere may still write.
        is_held = not all(worker_is_dead(attempt.worker) for attempt in recording.attempts)
        if _pinned_to(recording.rollout, lost) and not is_held:
            gone.append(recording.rollout.rollout_id)
    if gone:
        # Cancelled before they are deleted, because stores delete finished rollouts only.
        await store.cancel(gone)
        await store.delete(gone)
    return len(gone)


async def _is_lost(store: Store, version: tuple[str, str], states: Mapping[str, AlgorithmState]) -> bool:
    """Return true for a version that belongs to a step after the last one that was saved."""
    try:
        found = await store.resource(*version)
    except NotFoundError:
        return False
    # Versions of an algorithm that left the file are never removed.
    state = states.get(found.algorithm)
    return DEFERRED in found.metadata and state is not None and found.step > state.step


def _pinned_to(rollout: Rollout, lost: Mapping[tuple[str, str], bool]) -> bool:
    return any(lost[version] for version in rollout.resources.items())
