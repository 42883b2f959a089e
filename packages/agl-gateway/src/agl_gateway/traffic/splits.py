"""Splits served traffic into arms, each with the resource versions that its label names.

``production=0.9,candidate=0.1`` gives a tenth of all rollouts to the arm ``candidate``. The arm follows from a hash of
the user, else of the conversation, else of the rollout's id, so all gateways decide alike without shared state. The
first label is the baseline of the comparison. Versions are pinned when the rollout is queued, and recorded with its
arm; a label that moves later does not affect it.

A gateway without a split of its own serves the one that `agl learn` saves in the store. That split names its versions
itself, and assigns conversations only.

A user or an agent with a variant gets its versions, and the shared ones of everything else; see
:class:`~agl_inspect.records.splits.Variant`.

:func:`split_report` compares the rewards of the arms by the gate, as evidence for a promotion. It counts rollouts that
a split assigned while the labels named the same versions as now, so all arms served the same traffic at the same time.
Conversations count from their first call on, other rollouts once they are finished. A failed rollout counts as 0. A
rollout without a reward is left out, and the report gives the number of such rollouts.
"""

import asyncio
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from agl import Gate
from agl.contracts import RolloutQuery, Store
from agl.errors import ConfigError, ConflictError, NotFoundError
from agl.schemas import Record, Rollout
from agl_inspect.records.labels import LABEL
from agl_inspect.records.splits import (
    KEY,
    SERVED,
    ArmReport,
    Pins,
    Placement,
    Sample,
    ServedSplit,
    Variant,
    decided,
    placement_of,
    unit_of,
    variant_of,
)
from agl_inspect.statistics import Comparison, comparison_of, span_of
from agl_inspect.terminal.query import COUNTED, is_counted, pages, rewards_of

_EXAMPLE = "write --split production=0.9,candidate=0.1"


def parse_split(text: str) -> ServedSplit:
    """Parse a split from ``LABEL=SHARE,LABEL=SHARE,...``; its versions are missing, as the labels decide them.

    Raises:
        ConfigError: The text is no split.
    """
    shares: dict[str, float] = {}
    if "," not in text:
        raise ConfigError(f"--split {text!r} needs two arms or more, with commas between them; {_EXAMPLE}")
    for part in text.split(","):
        label, _, number = (piece.strip() for piece in part.partition("="))
        if not LABEL.fullmatch(label) or label in shares:
            why = "is given twice" if label in shares else "may hold letters, digits, '_', '.' and '-' only"
            raise ConfigError(f"--split {text!r}: the label {label!r} {why}; {_EXAMPLE}")
        shares[label] = _share(text, label, number)
    total = sum(shares.values())
    if abs(total - 1.0) > 1e-9:
        raise ConfigError(f"--split {text!r}: the shares add up to {total:g} and must add up to 1; {_EXAMPLE}")
    return ServedSplit(shares=shares, versions={})


def _share(text: str, label: str, number: str) -> float:
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise ConfigError(
            f"--split {text!r}: the share of {label!r} is {number!r}, not a number between 0 and 1; {_EXAMPLE}"
        )
    return share


async def pins_of(store: Store, labels: Sequence[str]) -> Pins:
    """Return the version of each resource in every arm, by label and resource name.

    Only resources that have the first label are included. If such a resource lacks another arm's label, that arm gets
    the version of the first label.
    """
    baseline = labels[0]
    pointing = await _versions_by_label(store)
    covered = {name: named for name, named in pointing.items() if baseline in named}
    return {label: {name: named.get(label, named[baseline]) for name, named in covered.items()} for label in labels}


async def _versions_by_label(store: Store) -> Pins:
    """Return the version that each label points at, by resource name and label."""
    found: Pins = {}
    for move in await store.labels():
        found.setdefault(move.name, {})[move.label] = move.version
    return found


async def check_labels(store: Store, labels: Iterable[str]) -> None:
    """Raise :class:`ConfigError` if a label names no version, or if a labelled resource lacks the first label."""
    wanted = list(labels)
    pointing = await _versions_by_label(store)
    for label in wanted:
        if not any(label in named for named in pointing.values()):
            known = sorted({known for named in pointing.values() for known in named})
            raise ConfigError(
                f"the label {label!r} names no version of any resource in this store, whose labels are "
                f"{known or 'none'}; run: agl resources promote NAME VERSION --label {label}"
            )
    for name, named in pointing.items():
        if wanted[0] not in named and set(wanted) & named.keys():
            raise ConfigError(
                f"{name!r} has no label {wanted[0]!r}, so the arms cannot be compared; run: "
                f"agl resources promote {name} VERSION --label {wanted[0]}"
            )


def place_rollout(rollout: Rollout, split: ServedSplit, *, variant: tuple[str, Variant] | None = None) -> Rollout:
    """Return the rollout with the versions of its variant or else of its arm pinned, and the placement in its metadata.

    A rollout that already has an arm, or that pins a resource that the split decides, is returned unchanged.
    """
    names = decided(split.versions)
    if KEY in rollout.metadata or any(name in rollout.resources for name in names):
        return rollout
    if variant is not None:
        arm, own = variant
        shared = max(split.shares, key=split.shares.__getitem__)
        placement = Placement(arm=arm, shares={arm: 1.0}, versions={arm: {}})
        pinned = {**split.versions[shared], **own.versions}
    else:
        arm = split.arm_of(unit_of(rollout, by_user=split.by_user))
        versions = _restricted(split.versions, names)
        placement = Placement(arm=arm, shares=split.shares, versions=versions, salt=split.salt)
        pinned = split.versions[arm]
    return msgspec.structs.replace(
        rollout,
        resources={**pinned, **rollout.resources},
        metadata={**rollout.metadata, KEY: msgspec.to_builtins(placement)},
    )


def arm_of(rollout: Rollout) -> str:
    """Return the label of a rollout's arm; ``""`` if no split assigned one."""
    placement = placement_of(rollout)
    return "" if placement is None else placement.arm


class Splitter:
    """Assigns new rollouts to arms and pins their versions. Stateless: all its decisions are in the store.

    Args:
        split: The split of the command line, whose versions are those of its labels; ``None`` to serve the split that
            the store holds at each moment.
    """

    def __init__(self, store: Store, split: ServedSplit | None) -> None:
        self._store = store
        self._split = split

    async def current(self) -> ServedSplit | None:
        """Return the split with its current versions; ``None`` if no split is served."""
        if self._split is None:
            return await SERVED.get(self._store)
        return msgspec.structs.replace(self._split, versions=await pins_of(self._store, list(self._split.shares)))

    async def is_on(self) -> bool:
        """Return true while a split is served."""
        return await self.current() is not None

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Queue rollouts with the versions of their arms; returns them as stored.

        A rollout that the store already has keeps its first arm and versions, even if the split has changed.
        """
        split = await self.current()
        if split is None:
            return await self._store.enqueue(rollouts)
        try:
            return await self._store.enqueue([await self._placed(rollout, split) for rollout in rollouts])
        except ConflictError:
            return await self._store.enqueue([await self._with_first_placement(rollout, split) for rollout in rollouts])

    async def _placed(self, rollout: Rollout, split: ServedSplit) -> Rollout:
        return place_rollout(rollout, split, variant=await variant_of(self._store, rollout))

    async def _with_first_placement(self, rollout: Rollout, split: ServedSplit) -> Rollout:
        try:
            (known,) = await self._store.rollouts(RolloutQuery(ids=(rollout.rollout_id,)))
        except NotFoundError:
            return await self._placed(rollout, split)
        if KEY not in known.metadata:
            return rollout
        metadata = {**rollout.metadata, KEY: known.metadata[KEY]}
        return msgspec.structs.replace(rollout, resources=known.resources, metadata=metadata)


_PAGE = 500


class SplitReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of all arms, the baseline first, and the comparison of each other arm with the baseline.

    Attributes:
        differing: Resources in which the arms differ; if empty, there is nothing to compare.
        against: The comparison with the baseline, by label; ``None`` while an arm has no reward.
    """

    arms: list[ArmReport]
    differing: list[str]
    against: dict[str, Comparison | None]


class Placed(NamedTuple):
    """A rollout in a split, with its arm and its reward."""

    rollout: Rollout
    arm: str
    reward: float | None

    @property
    def counted(self) -> float | None:
        """The reward, 0 for a failed rollout without one; ``None`` if the rollout is left out."""
        return 0.0 if self.reward is None and self.rollout.status == "failed" else self.reward


async def placed_rollouts(store: Store, pins: Pins, *, experiment: str | None) -> list[Placed]:
    """Return the rollouts in a split, in the order in which they were placed; reads the spans of every one.

    Only rollouts whose arms had the versions in ``pins`` count.
    """
    names, found = decided(pins), list[Placed]()
    query = RolloutQuery(experiment=experiment, status=COUNTED, limit=_PAGE)
    if not names:
        return found
    async for page in pages(store, query):
        arms = {r.rollout_id: arm for r in page if is_counted(r) and (arm := _arm(r, pins, names)) is not None}
        found += [Placed(r, arms[r.rollout_id], reward) async for r, reward in rewards_of(store, list(arms))]
    return sorted(found, key=lambda placed: placed.rollout.created_at)


async def split_report(store: Store, pins: Pins, *, experiment: str | None = None, error: float = 0.05) -> SplitReport:
    """Report the rewards of the arms with the versions in ``pins``, the baseline first.

    ``error`` is the largest probability of a wrong verdict in each comparison.
    """
    placed = await placed_rollouts(store, pins, experiment=experiment)
    samples = {label: Sample() for label in pins}
    for each in placed:
        samples[each.arm].add(each.rollout, each.reward)
    between = _restricted(pins, decided(pins))
    baseline, *others = pins
    # A gate takes seconds for ten thousand units; in a thread, the gateway goes on serving.
    compared = [await asyncio.to_thread(compare_placed, placed, baseline, each, error=error / 2) for each in others]
    return SplitReport(
        arms=[samples[label].report(label, between[label]) for label in pins],
        differing=decided(pins),
        against=dict(zip(others, compared, strict=True)),
    )


def compare_placed(
    placed: Sequence[Placed],
    old: str,
    new: str,
    *,
    error: float,
    gain: float = 0.0,
    span: float | None = None,
) -> Comparison | None:
    """Compare two arms of a split by their units; ``None`` if an arm has no reward.

    The rollouts of one user or conversation enter once, by their mean. A user whose arm changed, because the shares
    did, counts with the first arm.

    Args:
        placed: The rollouts in the order in which they were placed.
        old: The label of the first arm.
        new: The label of the second arm.
        error: The largest probability of a wrong ``better``, and of a wrong ``worse``.
        gain: The gain in reward above which the second arm counts as better.
        span: The largest possible reward minus the smallest one; by default that of :func:`span_of`.
    """
    units = _units(placed, old, new)
    before, after = ([reward for unit in units if unit.arm == label for reward in unit.rewards] for label in (old, new))
    if not before or not after:
        return None
    gate = Gate(error=error, gain=gain, span=span_of([*before, *after]) if span is None else span)
    for unit in units:
        gate.arrive(fmean(unit.rewards), is_new=unit.arm == new, share=unit.share)
    means, counts = (fmean(before), fmean(after)), (len(before), len(after))
    return comparison_of(gate, means=means, counts=counts, is_split=True)


class _Unit(NamedTuple):
    """A user, a conversation or a rollout in one of two arms, with the probability of the second arm."""

    arm: str
    share: float
    rewards: list[float]


def _units(placed: Sequence[Placed], old: str, new: str) -> list[_Unit]:
    units: dict[str, _Unit] = {}
    for each in placed:
        placement = placement_of(each.rollout)
        if placement is None or each.arm not in (old, new) or each.counted is None:
            continue
        share = placement.shares[new] / (placement.shares[new] + placement.shares[old])
        unit = units.setdefault(unit_of(each.rollout), _Unit(each.arm, share, []))
        if unit.arm == each.arm:
            unit.rewards.append(each.counted)
    return list(units.values())


def _arm(rollout: Rollout, pins: Pins, names: Sequence[str]) -> str | None:
    """Return the rollout's arm; ``None`` if no split assigned one, or the arms had other versions than ``pins``."""
    placement = placement_of(rollout)
    if placement is None or placement.arm not in pins or not pins.keys() <= placement.versions.keys():
        return None
    then = {label: placement.versions[label] for label in pins}
    return placement.arm if _restricted(then, decided(then)) == _restricted(pins, names) else None


def _restricted(pins: Pins, names: Sequence[str]) -> Pins:
    """Return the pins of the resources in ``names`` only."""
    return {label: {name: own[name] for name in names} for label, own in pins.items()}
