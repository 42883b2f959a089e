"""The rollouts around one rollout: those of its step, and among them those of its group."""

from collections.abc import Callable, Sequence
from math import isclose
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from agl.contracts import RolloutQuery, Store
from agl.schemas import Record, Rollout
from agl_inspect.records.names import step_name
from agl_inspect.rollouts.span_reader import reward_of

_PAGE, _PAGES = 100, 10

Order = Literal["step", "group", "reward"]
"""The rollouts that follow each other: those of a step, of a group, or of a step from low reward to high."""


class Neighbours(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rollout's place among others, from 1; ``previous`` and ``next`` are ids, or ``""`` at the ends."""

    by: Order
    place: int
    total: int
    previous: str
    next: str


class Siblings(NamedTuple):
    """The rollouts of a rollout's step in the order of their ids, with their groups and rewards."""

    rows: list[tuple[str, str, float | None]]

    def neighbours(self, rollout: Rollout, by: Order) -> Neighbours | None:
        """Return the rollout's place; ``None`` if it has no group, or the step is too large."""
        keys: dict[Order, Callable[[Any], Any]] = {"reward": lambda row: (row[2] is not None, row[2] or 0.0, row[0])}
        rows = [row for row in self.rows if by != "group" or (rollout.group_id and row[1] == rollout.group_id)]
        ids = [row[0] for row in sorted(rows, key=keys.get(by, lambda row: row[0]))]
        if rollout.rollout_id not in ids:
            return None
        at = ids.index(rollout.rollout_id)
        previous, following = ids[at - 1] if at else "", ids[at + 1] if at + 1 < len(ids) else ""
        return Neighbours(by=by, place=at + 1, total=len(ids), previous=previous, next=following)

    def rewards(self, group: str) -> list[float]:
        """Return the rewards of a group's rollouts."""
        return [reward for _, own, reward in self.rows if group and own == group and reward is not None]


async def siblings_of(store: Store, rollout: Rollout) -> Siblings:
    """Read the rollouts of a rollout's step; without a step, those of its group or its run, the newest only."""
    query = RolloutQuery(experiment=rollout.experiment or None, mode=rollout.mode, limit=_PAGE)
    prefix = step_prefix(rollout)
    if not prefix:
        query = replace(query, group_id=rollout.group_id or None, sort="created_at", is_newest_first=True)
    rows: list[tuple[str, str, float | None]] = []
    for _ in range(_PAGES if prefix else 1):
        page = await store.recordings(replace(query, after=query.after or prefix), spans="none")
        own = [each for each in page if each.rollout.rollout_id.startswith(prefix)]
        rows += [(each.rollout.rollout_id, each.rollout.group_id, reward_of(each)) for each in own]
        if len(own) < _PAGE:
            break
        query = query.next(page[-1].rollout)
    return Siblings(rows)


def reason_of_silence(rewards: Sequence[float]) -> str:
    """Return why a group gave no advantage, as the end of a sentence; ``""`` if its rewards differ."""
    if len(rewards) < 2 or len(set(rewards)) > 1:
        return ""
    return f", because all {len(rewards)} rewards are {rewards[0]:.4g}"


def standing(reward: float | None, rewards: Sequence[float], advantage: float | None = None) -> str:
    """Return how a reward compares with those of its group, and the formula of its advantage; ``""`` without a group.

    The formula is GRPO's, with or without the standard deviation, if it gives the ``advantage`` that a step reported.
    """
    if reward is None or len(rewards) < 2:
        return ""
    if reason := reason_of_silence(rewards):
        return f"No advantage{reason}."
    mean, spread = fmean(rewards), stdev(rewards)
    side = "above" if reward > mean else "below" if reward < mean else "at"
    said = f"The reward {reward:.4g} is {side} the mean {mean:.4g} of its group of {len(rewards)}."
    apart = reward - mean
    if advantage is None:
        return said
    if isclose(advantage, apart / spread, rel_tol=0.01):
        words = f"({reward:.4g} - {mean:.4g}) / {spread:.4g}, the distance from the mean in standard deviations"
    elif isclose(advantage, apart, rel_tol=0.01):
        words = f"{reward:.4g} - {mean:.4g}, the distance from the mean"
    else:
        return said
    return f"{said} Its advantage is {words}: {advantage:+.4g}."


def step_prefix(rollout: Rollout) -> str:
    """Return the start of the ids of a step's rollouts; ``""`` for a rollout that no algorithm asked for."""
    step, algorithm = rollout.metadata.get("step"), rollout.metadata.get("algorithm")
    if not isinstance(step, int):
        return ""
    start, mark, _ = rollout.rollout_id.partition(f"-{algorithm}-{rollout.mode}-{step_name(step)}-")
    return start + mark if mark else ""
