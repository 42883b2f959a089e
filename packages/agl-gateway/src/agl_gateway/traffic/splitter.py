"""Places rollouts that are queued through this gateway in the arms of the split."""

from collections.abc import Sequence

import msgspec

from agl.contracts import RolloutQuery, Store
from agl.errors import ConflictError, NotFoundError
from agl.schemas import Rollout
from agl_gateway.traffic.splits import KEY, Pins, Split, pins_of, place_rollout


class Splitter:
    """Pins the versions of new rollouts. It has no state: all its decisions are in the store."""

    def __init__(self, store: Store, split: Split) -> None:
        self._store = store
        self.split = split

    async def pins(self) -> Pins:
        """Return the current versions of the arms."""
        return await pins_of(self._store, list(self.split.shares))

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Queue rollouts with the versions of their arms; returns them as stored.

        A rollout that is known already keeps its first arm and versions, even if labels or shares have changed.
        """
        pins = await self.pins()
        try:
            return await self._store.enqueue([place_rollout(rollout, self.split, pins) for rollout in rollouts])
        except ConflictError:
            return await self._store.enqueue([await self._with_first_placement(rollout, pins) for rollout in rollouts])

    async def _with_first_placement(self, rollout: Rollout, pins: Pins) -> Rollout:
        try:
            (known,) = await self._store.rollouts(RolloutQuery(ids=(rollout.rollout_id,)))
        except NotFoundError:
            return place_rollout(rollout, self.split, pins)
        if KEY not in known.metadata:
            return rollout
        metadata = {**rollout.metadata, KEY: known.metadata[KEY]}
        return msgspec.structs.replace(rollout, resources=known.resources, metadata=metadata)
