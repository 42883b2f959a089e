"""Follows the store's change feed once, for all parts of the gateway."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agl.contracts import Change, RolloutQuery, Store
from agl.errors import StoreError

_log = logging.getLogger(__name__)

_WAIT_S = 10.0
_PATIENCE_S = 10.0
"""Seconds beyond the wait after which a read counts as unanswered."""

_PAUSE_S = 0.2
_AFTER_FAILURE_S = 1.0
_PAGE = 1000


@dataclass(eq=False, kw_only=True)
class Feed:
    """Reads the store's change feed and passes the changes to listeners, a fraction of a second after they happen.

    Attributes:
        on_changes: Called with every batch, in order.
        on_gap: Called when reading the feed failed and changes may have been missed.
        failure: Why the store counts as away; ``""`` while it answers.
    """

    store: Store
    on_changes: Sequence[Callable[[Sequence[Change]], None]]
    on_gap: Callable[[], None]
    failure: str = field(default="", init=False)

    async def follow(self, cursor: int) -> None:
        """Follow the change feed from ``cursor`` on, until the task is cancelled."""
        is_failing = False
        while True:
            wait_s = 0.0 if is_failing else _WAIT_S  # after a failure, the store's return is noticed at once
            late = asyncio.get_running_loop().call_later(wait_s + _PATIENCE_S, self._is_late, wait_s + _PATIENCE_S)
            try:
                changes = await self.store.changes(after=cursor, limit=10_000, wait_s=wait_s)
            except Exception as error:  # noqa: BLE001  # any store's code; the gateway works without the feed
                changes = None
                if not is_failing:
                    is_defect = not isinstance(error, StoreError)
                    _log.warning("the store's change feed failed; trying again: %s", error, exc_info=is_defect)
                self.on_gap()
                self.failure = await self._unless_store_answers(str(error) or type(error).__name__)
            finally:
                late.cancel()
            is_failing = changes is None
            if changes is None:
                await asyncio.sleep(_AFTER_FAILURE_S)
                continue
            self.failure = ""
            if changes:
                cursor = changes[-1].cursor
            for listener in self.on_changes:
                listener(changes)
            await asyncio.sleep(_PAUSE_S)

    def _is_late(self, seconds: float) -> None:
        """Count the store as away until the read that is late ends: a further read would be no faster."""
        self.failure = f"no answer within {seconds:g} s"
        _log.warning("the store's change feed is late: %s", self.failure)

    async def _unless_store_answers(self, failure: str) -> str:
        """Return ``failure``, or ``""`` if the store answers and only its feed cannot be read."""
        try:
            await self.store.cursor()
        except Exception:  # noqa: BLE001  # the error of the feed is logged
            return failure
        return ""


class QueueLength:
    """The number of queued rollouts, kept up to date by the change feed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queued: set[str] = set()

    def __len__(self) -> int:
        return len(self._queued)

    async def load(self) -> None:
        """Read all queued rollouts from the store."""
        after = ""
        while True:
            page = await self._store.rollouts(RolloutQuery(status=("queued",), after=after, limit=_PAGE))
            self._queued.update(rollout.rollout_id for rollout in page)
            if len(page) < _PAGE:
                return
            after = page[-1].rollout_id

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Update the set of queued rollouts."""
        for change in changes:
            if change.kind == "rollout":
                (self._queued.add if change.status == "queued" else self._queued.discard)(change.key)
