"""Records only a share of the conversations that a gateway relays, for production traffic too large to record whole.

A conversation is recorded or left out as a whole. With :attr:`Share.base_rate` alone, the conversation's id decides, so
all gateways of a store decide alike, also after a restart. With :attr:`Share.reward_threshold`, all other conversations
are recorded too, and removed some time after their end unless their reward has reached the threshold. Rollouts of
experiments are never left out, and neither are conversations while `agl learn` serves a split.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError, StoreError
from agl.schemas import Rollout
from agl_gateway.recent import Recent
from agl_gateway.settings import Share
from agl_inspect.records.splits import KEY
from agl_inspect.retention import delete_finished, needed_experiments
from agl_inspect.terminal.query import CONVERSATIONS, rewards_of

_log = logging.getLogger(__name__)

MARK = "kept_by_reward"
"""Metadata key of a conversation that is kept only if its reward reaches the threshold."""

NOT_RECORDED = "x-agl-not-recorded"
"""Response header of a call that is not recorded; its value is the setting that excludes the call."""

_MINUTE_S = 60.0
_REMEMBERED = 10_000
_PAGE = 500
_SWEEPS = 4
"""How often per ``reward_wait_s`` conversations to remove are looked for."""


class KeptTraffic:
    """Decides for each conversation if it is recorded. Used in one event loop only.

    Attributes:
        calls: The number of calls that were relayed but not recorded.
        removed: The number of conversations that were removed because their reward did not reach the threshold.
    """

    def __init__(self, share: Share, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = share
        self._idle_s = idle_s
        self._clock = clock
        self._recorded: deque[float] = deque()
        self._over_limit: Recent[str, float] = Recent(_REMEMBERED)
        self.calls = 0
        self.removed = 0

    def marks(self, rollout_id: str) -> dict[str, bool]:
        """Return the metadata of a new conversation: ``{MARK: True}`` if only its reward can keep it, else empty."""
        return {} if self.share.holds(rollout_id) else {MARK: True}

    def left_out_by(self, rollout_id: str, *, is_known: bool = False) -> str:
        """Return the setting that excludes a conversation from recording; ``""`` if the conversation is recorded.

        Args:
            rollout_id: The conversation's rollout.
            is_known: True if earlier calls of the conversation are recorded; then later calls are recorded too.
        """
        if is_known:
            return ""
        if self.share.reward_threshold is None and not self.share.holds(rollout_id):
            return "base_rate"
        now, limit = self._clock(), self.share.max_spans_per_minute
        if not limit:
            return ""
        while self._recorded and self._recorded[0] <= now - _MINUTE_S:
            self._recorded.popleft()
        since = self._over_limit.pop(rollout_id, None)
        if len(self._recorded) >= limit or (since is not None and now - since < self._idle_s):
            self._over_limit[rollout_id] = now
            return "max_spans_per_minute"
        return ""

    def count(self, *, is_recorded: bool) -> None:
        """Count a call of a conversation, by whether it is recorded."""
        if not is_recorded:
            self.calls += 1
        elif self.share.max_spans_per_minute:
            self._recorded.append(self._clock())


class RewardSweep:
    """Removes the conversations whose reward has not reached the threshold in time.

    It acts on the store's content alone, so several gateways may sweep, and a restarted gateway continues.
    """

    def __init__(self, store: Store, traffic: KeptTraffic, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._traffic = traffic
        self._clock = clock
        self._last: Rollout | None = None

    async def remove(self) -> int:
        """Remove the conversations whose reward did not reach the threshold in time; returns how many.

        Nothing is removed while an algorithm that runs or can be resumed learns from conversations.
        """
        if CONVERSATIONS in await needed_experiments(self._store, [CONVERSATIONS]):
            return 0
        count, until = 0, self._clock() - self._traffic.share.reward_wait_s
        while page := await self._finished():
            due = [rollout for rollout in page if rollout.finished_at <= until]
            marked = [one.rollout_id for one in due if one.metadata.get(MARK) and KEY not in one.metadata]
            try:
                removed = await self._remove(marked)
            except NotFoundError:
                continue  # another gateway removed one meanwhile; the page is read again
            count += removed
            self._traffic.removed += removed
            if due:
                self._last = due[-1]
            if len(due) < len(page):
                break
        return count

    async def _finished(self) -> list[Rollout]:
        query = RolloutQuery(experiment=CONVERSATIONS, status=("succeeded",), sort="finished_at", limit=_PAGE)
        return await self._store.rollouts(query if self._last is None else query.next(self._last))

    async def _remove(self, rollout_ids: list[str]) -> int:
        threshold = self._traffic.share.reward_threshold
        assert threshold is not None  # noqa: S101  # otherwise nothing starts the sweep
        low = [
            rollout.rollout_id
            async for rollout, reward in rewards_of(self._store, rollout_ids)
            if reward is None or reward < threshold
        ]
        return len(await delete_finished(self._store, low))

    async def run(self) -> None:
        """Call :meth:`remove` periodically, until the task is cancelled."""
        while True:
            try:
                await self.remove()
            except StoreError as error:
                _log.warning("conversations below the threshold could not be removed; trying again: %s", error)
            await asyncio.sleep(max(1.0, self._traffic.share.reward_wait_s / _SWEEPS))
