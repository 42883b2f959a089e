"""Reads the arms of rollouts in a split of served traffic, and sums up the rewards of an arm."""

from dataclasses import dataclass, field

import msgspec

from agl.schemas import Record, Rollout
from agl_inspect.records.shelf import Shelf
from agl_inspect.statistics import interval

KEY = "split"
"""The key of the :class:`Placement` in the metadata of a rollout."""

Pins = dict[str, dict[str, str]]
"""The pinned versions in a split, by label and then by resource."""


class Placement(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The arm of a split to which a rollout was assigned, as recorded in the rollout's metadata.

    Attributes:
        arm: The label whose versions the rollout is pinned to.
        shares: The split's shares when the rollout was queued.
        versions: Versions by label and resource, for the resources in which the arms differed.
    """

    arm: str
    shares: dict[str, float]
    versions: Pins


def placement_of(rollout: Rollout) -> Placement | None:
    """Return the arm to which a split assigned the rollout; ``None`` if no split did."""
    found = rollout.metadata.get(KEY)
    try:
        return None if found is None else msgspec.convert(found, Placement)
    except msgspec.ValidationError:
        return None  # foreign metadata under the same key


def unit_of(rollout: Rollout) -> str:
    """Return the unit that a split assigns to an arm: the rollout's user or conversation, otherwise the rollout."""
    named = (rollout.metadata.get(key) for key in ("user", "conversation"))
    return next((name for name in named if isinstance(name, str) and name), rollout.rollout_id)


class ServedSplit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The split that all gateways serve, as `agl learn` saves it in the store.

    Attributes:
        shares: Each label's share of the traffic, the baseline first; one label with the share 1 serves all traffic.
        versions: The versions of each arm, by label and resource.
        salt: A text that is hashed with the unit's name, so that each candidate meets other users first.
        by_user: Whether all conversations of one user get the same arm.
    """

    shares: dict[str, float]
    versions: Pins
    salt: str = ""
    by_user: bool = True


SERVED = Shelf(ServedSplit, "split/served/")
"""The shelf of the split that gateways serve; a single record."""


class ArmReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of one arm.

    Attributes:
        label: The label whose versions the arm serves.
        versions: Versions of the resources in which the arms differ.
        rollouts: The number of rollouts that count.
        failed: The number of counted rollouts that failed.
        unrewarded: The number of counted rollouts that did not fail but have no reward.
        mean: Mean reward; ``None`` without any reward.
        low: Lower end of the mean's interval; ``None`` for fewer than two rewards.
        high: Upper end of the mean's interval; ``None`` for fewer than two rewards.
    """

    label: str
    versions: dict[str, str]
    rollouts: int
    failed: int
    unrewarded: int
    mean: float | None
    low: float | None
    high: float | None

    @property
    def rewarded(self) -> int:
        """The number of rollouts whose rewards are in the mean."""
        return self.rollouts - self.unrewarded


@dataclass(kw_only=True)
class Sample:
    """The rewards of one arm, and the counts of :class:`ArmReport`, collected rollout by rollout."""

    rewards: list[float] = field(default_factory=list[float])
    failed: int = 0
    unrewarded: int = 0

    def add(self, rollout: Rollout, reward: float | None) -> None:
        """Add a rollout; a failed rollout without a reward counts as 0."""
        self.failed += rollout.status == "failed"
        if reward is not None or rollout.status == "failed":
            self.rewards.append(reward or 0.0)
        else:
            self.unrewarded += 1

    def report(self, label: str, versions: dict[str, str]) -> ArmReport:
        """Return the report of this arm, with its label and its versions."""
        count = len(self.rewards)
        low, high = interval(self.rewards) if count > 1 else (None, None)
        return ArmReport(
            label=label,
            versions=versions,
            rollouts=count + self.unrewarded,
            failed=self.failed,
            unrewarded=self.unrewarded,
            mean=sum(self.rewards) / count if count else None,
            low=low,
            high=high,
        )
