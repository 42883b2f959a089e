"""Compares the rewards of a serving split's arms, as evidence for a promotion.

It counts finished rollouts, and conversations from their first call on, that a split placed while the labels named the
versions that they name now, so all arms served the same traffic at the same time. A failed rollout counts 0; one
without a reward is left out, and the number of those is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agl.contracts import RolloutQuery, Store
from agl.schemas import Record, Rollout
from agl_gateway.traffic.splits import Pins, differing, pins_of, placement_of
from agl_inspect.statistics import Comparison, compare, interval
from agl_inspect.terminal.query import COUNTED, is_counted, pages, rewards_of

_PAGE = 500


class ArmReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of one arm.

    Attributes:
        label: The label whose versions the arm serves.
        versions: Versions of the resources in which the arms differ.
        rollouts: Number of rollouts that count.
        failed: Number of those that failed.
        unrewarded: Number of those that succeeded without a reward.
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
        """Number of rollouts in the mean."""
        return self.rollouts - self.unrewarded


class SplitReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """All arms, the baseline first, and the comparison of every other arm with it.

    Attributes:
        differing: Resources in which the arms differ; if empty, there is nothing to compare.
        against: Comparisons with the baseline by label; ``None`` while an arm has fewer than two rewards.
        confidence: Confidence of all intervals.
    """

    arms: list[ArmReport]
    differing: list[str]
    against: dict[str, Comparison | None]
    confidence: float


@dataclass(kw_only=True)
class Sample:
    """The counted rewards of one arm, in order of rollout id; other attributes as in :class:`ArmReport`."""

    rewards: list[float] = field(default_factory=list[float])
    failed: int = 0
    unrewarded: int = 0

    def add(self, rollout: Rollout, reward: float | None) -> None:
        """Count a rollout; a failed one has the reward 0 unless it got another."""
        self.failed += rollout.status == "failed"
        if reward is not None or rollout.status == "failed":
            self.rewards.append(reward or 0.0)
        else:
            self.unrewarded += 1


async def samples(store: Store, pins: Pins, *, experiment: str | None) -> dict[str, Sample]:
    """Return the rewards between these versions by label. Reads the spans of every rollout that the split placed."""
    names, found = differing(pins), {label: Sample() for label in pins}
    query = RolloutQuery(experiment=experiment, status=COUNTED, limit=_PAGE)
    if not names:
        return found
    async for page in pages(store, query):
        arms = {r.rollout_id: arm for r in page if is_counted(r) and (arm := _arm(r, pins, names)) is not None}
        async for rollout, reward in rewards_of(store, list(arms)):
            found[arms[rollout.rollout_id]].add(rollout, reward)
    return found


async def split_report(
    store: Store, labels: Sequence[str], *, experiment: str | None = None, confidence: float = 0.95
) -> SplitReport:
    """Report the rewards of the arms that ``labels`` name, the baseline first."""
    pins = await pins_of(store, labels)
    found = await samples(store, pins, experiment=experiment)
    between = _restricted(pins, differing(pins))
    baseline, *others = labels
    return SplitReport(
        arms=[_report(label, between[label], found[label], confidence) for label in labels],
        differing=differing(pins),
        against={label: _compared(found[baseline].rewards, found[label].rewards, confidence) for label in others},
        confidence=confidence,
    )


def _report(label: str, versions: dict[str, str], sample: Sample, confidence: float) -> ArmReport:
    count = len(sample.rewards)
    low, high = interval(sample.rewards, confidence=confidence) if count > 1 else (None, None)
    return ArmReport(
        label=label,
        versions=versions,
        rollouts=count + sample.unrewarded,
        failed=sample.failed,
        unrewarded=sample.unrewarded,
        mean=sum(sample.rewards) / count if count else None,
        low=low,
        high=high,
    )


def _arm(rollout: Rollout, pins: Pins, names: Sequence[str]) -> str | None:
    """Return the rollout's arm; ``None`` if it was placed between other versions or not at all."""
    placement = placement_of(rollout)
    if placement is None or placement.arm not in pins or not pins.keys() <= placement.versions.keys():
        return None
    then = {label: placement.versions[label] for label in pins}
    return placement.arm if _restricted(then, differing(then)) == _restricted(pins, names) else None


def _restricted(pins: Pins, names: Sequence[str]) -> Pins:
    """Return the pins of the named resources only."""
    return {label: {name: own[name] for name in names} for label, own in pins.items()}


def _compared(old: Sequence[float], new: Sequence[float], confidence: float) -> Comparison | None:
    return compare(old, new, confidence=confidence) if min(len(old), len(new)) > 1 else None
