"""Reports waiting rollouts that no worker claims, in an experiment that leaves its attempts to ``agl worker``."""

import asyncio
import logging
from collections.abc import Callable

from agl.contracts import RolloutQuery, Store
from agl.errors import StoreError
from agl.schemas import RolloutStatus

_LOG = logging.getLogger("agl_run.run")

FIRST_S = 5.0
"""Seconds before the first report; the wait doubles after each."""

LONGEST_S = 120.0


class UnclaimedReport:
    """Checks periodically that queued rollouts are claimed: ``async with UnclaimedReport(store, name, say=print):``."""

    def __init__(self, store: Store, name: str, *, say: Callable[[str], None], first_s: float = FIRST_S) -> None:
        self._store = store
        self._name = name
        self._say = say
        self._first_s = first_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "UnclaimedReport":
        """Start checking."""
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        pause = self._first_s
        while True:
            await asyncio.sleep(pause)
            try:
                is_idle = await self._has("queued") and not await self._has("running")
            except StoreError as error:
                _LOG.warning("the queue could not be read to check for workers: %s", error)
                continue
            if is_idle:
                self._say(
                    f"rollouts wait and no worker claims them ([runner] concurrency is 0); start one, here or on "
                    f"another machine: agl worker FILE, with the file of experiment {self._name!r}"
                )
                pause = min(2 * pause, LONGEST_S)
            else:
                pause = self._first_s

    async def _has(self, status: RolloutStatus) -> bool:
        query = RolloutQuery(experiment=self._name, status=(status,), limit=1)
        return bool(await self._store.rollouts(query))
