"""Sums up the effect of a changed reward on recorded rollouts: on the mean, groups, parts and agreement with people.

An algorithm that compares the rollouts of a group, such as GRPO, learns nothing from a group of equal rewards, and
learns the same if all rewards of a group are scaled or shifted together. So the summary counts the groups whose
rollouts change their order, and the silent groups.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from agl.schemas import Record, Reward
from agl_inspect.records.gold import rating_of
from agl_replay.rescoring import Rescored

_EQUAL = 1e-9
"""Largest difference of rewards that count as equal; sums of the same parts in another order differ by less."""


GOOD = 0.5
"""The least reward or rating that counts as good."""

_DRAWS = 1000
"""Number of draws from the posterior of kappa."""

_NAMELESS = "(no name)"
"""Stands for a part whose name is ``""``, because here ``""`` stands for the reward itself."""


class GroupChange(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The groups of at least two rollouts that have a reward before and after.

    Attributes:
        groups: Number of these groups.
        rollouts: Number of rollouts in these groups.
        silent_before: Number of groups whose recorded rewards are all equal.
        silent_after: Number of groups whose new rewards are all equal.
        reordered: Number of groups in which rollouts changed their order, became equal, or stopped being equal.
        turned: Number of rollouts that were above, at or below their group's mean, and no longer are on that side.
    """

    groups: int
    rollouts: int
    silent_before: int
    silent_after: int
    reordered: int
    turned: int


class PartChange(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The recorded and the new values of a reward, or of one of its parts.

    Attributes:
        name: The reward's name.
        part: The part's name, ``""`` for the reward itself.
        scope: The reward's scope.
        before: The recorded values, ``None`` if there are none.
        after: The new values, ``None`` if there are none.
    """

    name: str
    part: str
    scope: str
    before: "Values | None"
    after: "Values | None"


class Values(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The distribution of the values of a reward or of one of its parts.

    Attributes:
        n: Number of values.
        missing: Number of rewards without a value.
        spread: Standard deviation of the values.
        at_least: Share of the values that equal the least one.
        at_greatest: Share of the values that equal the greatest one.
    """

    n: int
    missing: int
    mean: float
    spread: float
    least: float
    at_least: float
    greatest: float
    at_greatest: float


class Agreement(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The agreement of a reward with people who rated the same rollouts; both call a rollout good from 0.5 on.

    Attributes:
        rated: Number of rollouts that people rated and that have the reward.
        praised: Number of these that the reward calls good and people do not.
        missed: Number of these that people call good and the reward does not.
        kappa: Cohen's kappa: 1 for full agreement, 0 for the agreement of chance (Cohen 1960).
        low: Lower end of the 95 % interval of kappa.
        high: Upper end of the interval.
    """

    rated: int
    praised: int
    missed: int
    kappa: float
    low: float
    high: float


class RewardChange(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The whole effect of a changed reward on recorded rollouts.

    Attributes:
        scored: Number of rollouts that were scored again.
        failed: Number of scored rollouts in which an emitter raised an error.
        skipped: Number of rollouts that were not scored.
        lost: Number of rollouts with a recorded reward and no new one.
        gained: Number of rollouts with a new reward and no recorded one.
        before: Mean over tasks of the recorded rewards, of the rollouts that have both rewards.
        after: Mean over tasks of the new rewards, of the same rollouts.
        tasks: Number of tasks of these rollouts.
        groups: The changes within groups.
        parts: The changes of each reward and of its parts.
        agreed_before: The agreement of the recorded rewards with people; ``None`` unless people called some rollouts
            good and others not.
        agreed_after: The agreement of the new rewards.
        errors: Number of errors of emitters by their text, the most frequent first.
    """

    scored: int
    failed: int
    skipped: int
    lost: int
    gained: int
    before: float | None
    after: float | None
    tasks: int
    groups: GroupChange
    parts: list[PartChange]
    agreed_before: Agreement | None
    agreed_after: Agreement | None
    errors: dict[str, int]


def sum_up(found: Sequence[Rescored]) -> RewardChange:
    """Sum up rollouts that were scored again."""
    scored = [one for one in found if not one.skipped]
    both = [(one, one.before, one.after) for one in scored if one.before is not None and one.after is not None]
    by_task = _gathered((one.group_id or one.rollout_id, before, after) for one, before, after in both)
    by_group = _gathered((one.group, before, after) for one, before, after in both)
    means = [(fmean(before), fmean(after)) for before, after in by_task.values()]
    return RewardChange(
        scored=len(scored),
        failed=sum(bool(one.errors) for one in scored),
        skipped=len(found) - len(scored),
        lost=sum(one.before is not None and one.after is None for one in scored),
        gained=sum(one.before is None and one.after is not None for one in scored),
        before=fmean([one for one, _ in means]) if means else None,
        after=fmean([one for _, one in means]) if means else None,
        tasks=len(by_task),
        groups=_groups([pair for pair in by_group.values() if len(pair[0]) > 1]),
        parts=_parts(scored),
        agreed_before=agreement([pair for one in scored if one.recorded for pair in _rated(one, one.before)]),
        agreed_after=agreement([pair for one in scored if one.rewards for pair in _rated(one, one.after)]),
        errors=_errors(scored),
    )


def agreement(pairs: Sequence[tuple[float, float]]) -> Agreement | None:
    """Return the agreement of (reward, rating) pairs; ``None`` unless some ratings are good and others are not.

    The interval is the central 95 % of kappa's posterior, with Jeffreys' prior for the four cells of the table of
    rewards and ratings. Unlike the usual interval from a standard error, it has a width if all pairs agree. The pairs
    have to be independent: of several rollouts of one task, the interval is too narrow.
    """
    table = Counter((reward >= GOOD, rating >= GOOD) for reward, rating in pairs)
    cells = [table[cell] for cell in ((True, True), (True, False), (False, True), (False, False))]
    if not (cells[0] + cells[2] and cells[1] + cells[3]):
        return None
    rng = random.Random(0)  # the same interval each time
    draws = sorted(_kappa([rng.gammavariate(count + 0.5, 1) for count in cells]) for _ in range(_DRAWS))
    low, high = draws[round(0.025 * _DRAWS)], draws[round(0.975 * _DRAWS)]
    return Agreement(rated=len(pairs), praised=cells[1], missed=cells[2], kappa=_kappa(cells), low=low, high=high)


def _kappa(cells: Sequence[float]) -> float:
    """Return kappa for the cells (both good, only the reward, only the rating, neither)."""
    both, reward, rating, neither = cells
    # kappa = (observed - chance) / (1 - chance), in the form for a table of two by two.
    return (
        2
        * (both * neither - reward * rating)
        / ((both + reward) * (reward + neither) + (both + rating) * (rating + neither))
    )


def _rated(one: Rescored, value: float | None) -> list[tuple[float, float]]:
    """Return the reward with the newest rating by a person, if there are both."""
    rating = rating_of(one.kept)
    return [] if rating is None or rating.value is None or value is None else [(value, rating.value)]


_Pairs = tuple[list[float], list[float]]


def _gathered(values: Iterable[tuple[str, float, float]]) -> dict[str, _Pairs]:
    found: dict[str, _Pairs] = {}
    for key, before, after in values:
        both = found.setdefault(key, ([], []))
        both[0].append(before)
        both[1].append(after)
    return found


def _groups(groups: Sequence[_Pairs]) -> GroupChange:
    return GroupChange(
        groups=len(groups),
        rollouts=sum(len(before) for before, _ in groups),
        silent_before=sum(_is_silent(before) for before, _ in groups),
        silent_after=sum(_is_silent(after) for _, after in groups),
        reordered=sum(_ranks(before) != _ranks(after) for before, after in groups),
        turned=sum(
            one != other for before, after in groups for one, other in zip(_sides(before), _sides(after), strict=True)
        ),
    )


def _is_silent(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _EQUAL


def _ranks(values: Sequence[float]) -> list[int]:
    """Return the rank of each value; equal values have the same rank."""
    ranks = [0] * len(values)
    place, last = 0, -math.inf
    for index in sorted(range(len(values)), key=values.__getitem__):
        place += values[index] - last > _EQUAL
        last = values[index]
        ranks[index] = place
    return ranks


def _sides(values: Sequence[float]) -> list[int]:
    """Return 1 for values above their mean, -1 for values below it, and 0 for the others."""
    mean = fmean(values)
    return [0 if abs(value - mean) <= _EQUAL else 1 if value > mean else -1 for value in values]


_Key = tuple[str, str, str]


def _parts(scored: Sequence[Rescored]) -> list[PartChange]:
    before = _by_part(reward for one in scored for reward in one.recorded)
    after = _by_part(reward for one in scored for reward in one.rewards)
    return [
        PartChange(name=name, part=part, scope=scope, before=_values(before.get(key)), after=_values(after.get(key)))
        for key in dict.fromkeys((*before, *after))
        for name, part, scope in (key,)
    ]


def _by_part(rewards: Iterable[Reward]) -> dict[_Key, list[float | None]]:
    found: dict[_Key, list[float | None]] = {}
    for reward in rewards:
        parts = ((name or _NAMELESS, value) for name, value in reward.dimensions.items())
        for part, value in (("", reward.value), *parts):
            found.setdefault((reward.name, part, reward.scope), []).append(value)
    return found


def _values(found: Sequence[float | None] | None) -> Values | None:
    known = [value for value in found or () if value is not None]
    if found is None or not known:
        return None
    least, greatest = min(known), max(known)
    return Values(
        n=len(known),
        missing=len(found) - len(known),
        mean=fmean(known),
        spread=pstdev(known),
        least=least,
        at_least=sum(value - least <= _EQUAL for value in known) / len(known),
        greatest=greatest,
        at_greatest=sum(greatest - value <= _EQUAL for value in known) / len(known),
    )


def _errors(scored: Sequence[Rescored]) -> dict[str, int]:
    errors = (error for one in scored for error in one.errors)
    named = (one.message if repr(one.emitter) in one.message else f"{one.emitter!r}: {one.message}" for one in errors)
    return dict(Counter(named).most_common())
