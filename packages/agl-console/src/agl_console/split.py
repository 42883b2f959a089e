"""The arms of a split of served traffic, in the view of a resource whose versions differ between them.

``agl serve --split`` writes into each rollout's metadata in which arm it is. Reading all of these rollouts takes long,
so the view looks through the newest, and ``agl resources split`` counts the others too.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from agl.contracts import Recording, RolloutQuery, Store
from agl.schemas import Record, Rollout
from agl_inspect.rollouts.span_reader import reward_of
from agl_inspect.statistics import interval
from agl_inspect.terminal.query import COUNTED, is_counted

LOOKED_THROUGH = 400
"""The newest rollouts among which the view looks for placed ones."""


class Arm(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An arm of a split, by its finished rollouts and the conversations that were begun.

    Attributes:
        share: The part of the traffic that it is to get.
        mean: Mean reward, in which a failed rollout counts 0 and one without a reward is left out; ``None`` without
            any. ``low`` and ``high`` are the ends of its 95 % interval, ``None`` for fewer than two rewards.
    """

    label: str
    version: str
    share: float
    rollouts: int
    failed: int
    rewarded: int
    mean: float | None
    low: float | None
    high: float | None


class SplitPart(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The arms of the newest split in which versions of a resource differ, the baseline first.

    Attributes:
        looked_through: Rollouts that were looked at.
    """

    arms: list[Arm]
    looked_through: int


class _Placement(Record, frozen=True, kw_only=True):
    """What the gateway records of a rollout in a split: ``versions`` by label and resource, where the arms differ."""

    arm: str
    shares: dict[str, float]
    versions: dict[str, dict[str, str]]

    def is_about(self, name: str) -> bool:
        """Return true if every arm has a version of the resource."""
        return self.arm in self.shares and all(name in self.versions.get(label, {}) for label in self.shares)

    def is_like(self, other: "_Placement") -> bool:
        """Return true if both are of one split, between the same versions."""
        return (self.shares, self.versions) == (other.shares, other.versions)


async def split_part(store: Store, name: str) -> SplitPart | None:
    """Read the arms of the newest split of a resource; ``None`` without one among the newest rollouts."""
    query = RolloutQuery(sort="created_at", is_newest_first=True, limit=LOOKED_THROUGH)
    looked = await store.recordings(query, spans="none")
    placed = [(one, where) for one in looked if (where := _placement(one.rollout)) and where.is_about(name)]
    if not placed:
        return None
    newest = placed[0][1]
    own = [(one, where.arm) for one, where in placed if where.is_like(newest) and _counts(one.rollout)]
    arms = [_arm(newest, name, label, [one for one, arm in own if arm == label]) for label in newest.shares]
    return SplitPart(arms=arms, looked_through=len(looked))


def _counts(rollout: Rollout) -> bool:
    return rollout.status in COUNTED and is_counted(rollout)


def _placement(rollout: Rollout) -> _Placement | None:
    found = rollout.metadata.get("split")
    try:
        return None if found is None else msgspec.convert(found, _Placement)
    except msgspec.ValidationError:
        return None  # somebody else's metadata under the same key


def _arm(placement: _Placement, name: str, label: str, found: Sequence[Recording]) -> Arm:
    known = [0.0 if one.rollout.status == "failed" else reward_of(one) for one in found]
    rewards = [reward for reward in known if reward is not None]
    low, high = interval(rewards) if len(rewards) > 1 else (None, None)
    return Arm(
        label=label,
        version=placement.versions[label][name],
        share=placement.shares[label],
        rollouts=len(found),
        failed=sum(one.rollout.status == "failed" for one in found),
        rewarded=len(rewards),
        mean=fmean(rewards) if rewards else None,
        low=low,
        high=high,
    )
