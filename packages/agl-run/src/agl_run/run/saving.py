"""Defers the saving of steps, and ends a run that has unsaved steps.

An algorithm with large states may leave steps unsaved for a while (``defer`` of its context). The store then has the
rollouts and metrics of such a step at once, but its state, ledger and live versions only with the next saved step. A
run that is killed continues from the last saved step and repeats the unsaved ones with the rollouts that they had
collected. So no rollout is paid for twice, and none is trained twice into weights that still exist.

A version that was published and not saved is in the store, because rollouts name it, but it has no files. Its metadata
in the store says so; see :data:`agl_inspect.records.state.DEFERRED`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Rollout
from agl.stores import read_recordings
from agl_inspect.presence import worker_is_dead
from agl_inspect.records.state import DEFERRED, AlgorithmState

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

SaveFn = Callable[[bool], Awaitable[bool]]
"""A coroutine function that saves an algorithm's files; see ``defer`` of :class:`agl.contracts.AlgorithmContext`."""


_PAGE = 1000


async def to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even if the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        # The shield lets the cancellation arrive here while the work continues.
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # ``wait`` does not raise the task's error; the cancellation stays the reason that the
        # caller sees.
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that it is not logged: the cancellation is the reason for the end
        raise


class Collecting:
    """Cancels the collection of rollouts when a run stops, without interrupting an update.

    A step that only waits for rollouts has changed nothing and can end. An algorithm may also collect in tasks of its
    own during an update; those tasks end, and the update goes on.
    """

    def __init__(self) -> None:
        self._tasks: Counter[asyncio.Task[Any] | None] = Counter()
        self._is_over = False

    @property
    def is_under_way(self) -> bool:
        """True while rollouts are being collected, for the current step or a later one."""
        return self._tasks.total() > 0

    def stop(self) -> None:
        """Cancel all running collections of rollouts, and every later attempt to start one, because the run stops."""
        # Set first: a task that is cancelled below may try to collect again from an ``except`` of
        # its own.
        self._is_over = True
        for task in [task for task, count in self._tasks.items() if task is not None and count]:
            task.cancel()

    def watched(self, call: F) -> F:
        """Wrap a coroutine function that collects rollouts, so that :meth:`stop` cancels its calls."""

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
    """Remove unfinished rollouts that are pinned to versions of unsaved steps; return how many were removed.

    Those versions are no longer live, so the rollouts would run with other versions than the repeated steps expect. The
    repeated steps enqueue the rollouts again, and the new attempts get the same ids. Therefore a rollout is not removed
    if a worker that may still be running has tried it: that worker could write to the new attempt. Such a rollout goes
    on with the live versions.
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
    """Return true if the version was published by a step after the last saved one."""
    try:
        found = await store.resource(*version)
    except NotFoundError:
        return False
    # Versions of an algorithm that left the file are never removed.
    state = states.get(found.algorithm)
    return DEFERRED in found.metadata and state is not None and found.step > state.step


def _pinned_to(rollout: Rollout, lost: Mapping[tuple[str, str], bool]) -> bool:
    return any(lost[version] for version in rollout.resources.items())
