"""Reads finished rollouts of another experiment in the same store, for an algorithm that learns from them.

The store's change feed lists rollouts in the order in which they finished, so that no rollout is read twice.
"""

from collections.abc import Sequence

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Record, Rollout

PREFIX = "experiment:"
"""Prefix of a source that names another experiment; a source without it names an algorithm."""

BATCH = 256
"""The default for the most rollouts in one page."""

_PAGE = 1000
_FINISHED = ("succeeded", "failed")


class FinishedRollouts(Record, frozen=True, kw_only=True):
    """A page of an experiment's finished rollouts.

    Attributes:
        rollouts: Training rollouts in the order in which they finished.
        cursor: Position in the change feed from which the next page is read.
        is_all: True if no further rollout had finished when the page was read.
    """

    rollouts: list[Rollout]
    cursor: int
    is_all: bool


def experiment_of(source: str) -> str:
    """Return the experiment that a source names; ``""`` if it names an algorithm."""
    return source.removeprefix(PREFIX) if source.startswith(PREFIX) else ""


async def finished(store: Store, experiment: str, *, after: int, limit: int = BATCH) -> FinishedRollouts:
    """Read at most ``limit`` training rollouts of an experiment that finished after the cursor ``after``."""
    found: list[Rollout] = []
    while changes := await store.changes(after=after, limit=_PAGE):
        ends = {
            change.key: change.cursor
            for change in changes
            if change.kind == "rollout" and change.status in _FINISHED and change.experiment == experiment
        }
        for rollout in await existing(store, list(ends)):
            found += [rollout] if rollout.mode == "train" else []
            if len(found) == limit:
                return FinishedRollouts(rollouts=found, cursor=ends[rollout.rollout_id], is_all=False)
        after = changes[-1].cursor
    return FinishedRollouts(rollouts=found, cursor=after, is_all=True)


async def existing(store: Store, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Read rollouts by id, in the given order; ids of rollouts that were removed are skipped."""
    if not rollout_ids:
        return []
    try:
        found = await store.rollouts(RolloutQuery(ids=tuple(rollout_ids), limit=len(rollout_ids)))
    except NotFoundError as error:
        if error.key not in rollout_ids:
            raise
        return await existing(store, [rollout_id for rollout_id in rollout_ids if rollout_id != error.key])
    by_id = {rollout.rollout_id: rollout for rollout in found}
    return [by_id[rollout_id] for rollout_id in rollout_ids]
