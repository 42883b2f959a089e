"""Remembers of each rollout what never changes and concerns its model calls: their mode and its seed."""

from collections import OrderedDict
from dataclasses import dataclass

from agl.contracts import RolloutQuery, Store, sampling_mode
from agl.errors import NotFoundError
from agl.schemas import Rollout
from agl_gateway.record.outage import Outage
from agl_run import greedy_policies

_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The mode by which a rollout's calls are sampled, the seed in its metadata, and the policies it asks greedily.

    They are ``""``, ``None`` and none if it has none or is not in the store.
    """

    mode: str = ""
    seed: int | None = None
    greedy: frozenset[str] = frozenset()


class RolloutFacts:
    """Reads the facts of a rollout once, as long as it is among the newest 10,000."""

    def __init__(self, store: Store, *, outage: Outage) -> None:
        self._store = store
        self._outage = outage
        self._known: OrderedDict[str, Facts] = OrderedDict()

    async def of(self, rollout_id: str) -> Facts:
        """Return the facts of a rollout; none while the store does not answer, unless they are known."""
        if rollout_id not in self._known:
            try:
                query = RolloutQuery(ids=(rollout_id,))
                found = await self._outage.unless(lambda: self._store.rollouts(query), list[Rollout])
            except NotFoundError:
                return Facts()
            if not found:
                return Facts()
            rollout = found[0]
            seed = rollout.metadata.get("seed")
            self._known[rollout_id] = Facts(
                mode=sampling_mode(rollout),
                seed=seed if isinstance(seed, int) else None,
                greedy=greedy_policies(rollout),
            )
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[rollout_id]
