"""Rollouts in a split of served traffic: each rollout's arm, as the gateway recorded it, and the rewards of an arm."""

from dataclasses import dataclass, field

import msgspec

from agl.schemas import Record, Rollout
from agl_inspect.statistics import interval

KEY = "split"
"""The key of the :class:`Placement` in a rollout's metadata."""

Pins = dict[str, dict[str, str]]
"""Versions by label, then by resource."""


class Placement(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The arm of a rollout in a split, as the rollout's metadata record it.

    Attributes:
        arm: The label whose versions the rollout is pinned to.
        shares: The split's shares when the rollout was queued.
        versions: Versions by label and resource, for the resources in which the arms differed.
    """

    arm: str
    shares: dict[str, float]
    versions: Pins


def placement_of(rollout: Rollout) -> Placement | None:
    """Return the rollout's placement; ``None`` if no split assigned an arm."""
    found = rollout.metadata.get(KEY)
    try:
        return None if found is None else msgspec.convert(found, Placement)
    except msgspec.ValidationError:
        return None  # foreign metadata under the same key


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
        """The number of rollouts in the mean."""
        return self.rollouts - self.unrewarded


@dataclass(kw_only=True)
class Sample:
    """The counted rewards of one arm, in the order in which they are read; for the counts see :class:`ArmReport`."""

    rewards: list[float] = field(default_factory=list[float])
    failed: int = 0
    unrewarded: int = 0

    def add(self, rollout: Rollout, reward: float | None) -> None:
        """Count a rollout; a failed rollout without a reward counts as 0."""
        self.failed += rollout.status == "failed"
        if reward is not None or rollout.status == "failed":
            self.rewards.append(reward or 0.0)
        else:
            self.unrewarded += 1

    def report(self, label: str, versions: dict[str, str], *, confidence: float = 0.95) -> ArmReport:
        """Return the report of the arm with this label and these versions."""
        count = len(self.rewards)
        low, high = interval(self.rewards, confidence=confidence) if count > 1 else (None, None)
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
