"""Splits of served traffic: the split that gateways serve, variants, the arms of rollouts, the rewards of an arm."""

from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from agl.contracts import Store
from agl.schemas import Record, Rollout
from agl_inspect.records.shelf import Shelf
from agl_inspect.statistics import interval

KEY = "split"
"""The key of the :class:`Placement` in the metadata of a rollout."""

USER = "user"
"""The key of the user's id in the metadata of a conversation's rollout."""

AGENT = "agent"
"""The key of the agent's name in the metadata of a conversation's rollout."""

CONVERSATION = "conversation"
"""The key of the conversation's id in the metadata of a rollout."""

Pins = dict[str, dict[str, str]]
"""The pinned versions in a split, by label and then by resource."""


class Placement(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The arm of a split to which a rollout was assigned, as recorded in the rollout's metadata.

    Attributes:
        arm: The label whose versions the rollout is pinned to.
        shares: The split's shares when the rollout was queued.
        versions: Versions by label and resource, for the resources that the split decided; see :func:`decided`.
        salt: The split's salt; see :class:`ServedSplit`.
    """

    arm: str
    shares: dict[str, float]
    versions: Pins
    salt: str = ""


def placement_of(rollout: Rollout) -> Placement | None:
    """Return the arm to which a split assigned the rollout; ``None`` if no split did."""
    found = rollout.metadata.get(KEY)
    try:
        return None if found is None else msgspec.convert(found, Placement)
    except msgspec.ValidationError:
        return None  # foreign metadata under the same key


def decided(pins: Pins) -> list[str]:
    """Return the names of the resources whose versions differ between the arms; of a single arm, all names."""
    names = dict.fromkeys(name for versions in pins.values() for name in versions)
    return [name for name in names if len(pins) == 1 or len({versions[name] for versions in pins.values()}) > 1]


def unit_of(rollout: Rollout, *, by_user: bool = True) -> str:
    """Return the unit that a split assigns to an arm: the user if it is known, else the conversation or the rollout."""
    named = rollout.metadata.get(USER) if by_user else None
    found = named or rollout.metadata.get(CONVERSATION)
    return found if isinstance(found, str) else rollout.rollout_id


def served_facts(rollout: Rollout) -> list[str]:
    """Describe the user and the arm of a rollout; empty if it has neither."""
    user, placement = rollout.metadata.get(USER), placement_of(rollout)
    facts = [f"user {user}"] if user else []
    if placement is not None:
        facts.append(f"arm {placement.arm}, {placement.shares.get(placement.arm, 0.0):.0%} of the traffic")
    return facts


class ServedSplit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A split of the traffic into arms.

    `agl learn` saves the split that all gateways serve in the store.

    Attributes:
        shares: Each label's share of the traffic, the baseline first; one label with the share 1 serves all traffic.
        versions: The versions of each arm, by label and resource. All arms name the same resources.
        salt: A text that is hashed with the unit's name, so that each candidate meets other users first.
        by_user: Whether all conversations of one user get the same arm.
        learner: The name of the learner that saved it; ``""`` for a split of the command line.
    """

    shares: dict[str, float]
    versions: Pins
    salt: str = ""
    by_user: bool = True
    learner: str = ""

    def arm_of(self, unit: str) -> str:
        """Return the label of the arm that a unit belongs to; every process gives the same answer at any time.

        The labels divide the interval from 0 to 1 in their order. So with two labels, a share that grows loses no unit.
        """
        text = f"agl-split/{self.salt}/{unit}" if self.salt else f"agl-split/{unit}"
        point = int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) / 2**64
        edge = 0.0
        *others, last = self.shares
        for label in others:
            edge += self.shares[label]
            if point < edge:
                return label
        return last


SERVED = Shelf(ServedSplit, "split/served/")
"""The shelf of the split that gateways serve; a single record."""


class HostedVersions(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The versions of a policy that `agl learn host` serves.

    Attributes:
        models: By version, the name of the model to request from the policy's upstream.
        problems: By version, the reason why the version cannot be served.
    """

    models: dict[str, str]
    problems: dict[str, str] = {}


HOSTED = Shelf(HostedVersions, "split/hosted/")
"""The shelf of hosted versions, by policy."""


class Variant(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The versions that one user or one agent gets instead of the shared ones, by resource.

    A conversation with a variant belongs to no arm, so it counts in no comparison.
    """

    versions: dict[str, str]


VARIANTS = Shelf(Variant, "split/variants/")
"""The shelf of the variants, under names such as ``user:ann`` and ``agent:writer``."""


async def variant_of(store: Store, rollout: Rollout) -> tuple[str, Variant] | None:
    """Return the variant of a rollout's user, else of its agent, with its name; ``None`` if neither has one."""
    for key in (USER, AGENT):
        if (whose := rollout.metadata.get(key)) and (found := await VARIANTS.get(store, f"{key}:{whose}")):
            return f"{key}:{whose}", found
    return None


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
