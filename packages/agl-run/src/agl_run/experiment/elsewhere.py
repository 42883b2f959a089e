"""Finished rollouts of another experiment in the same store, for an algorithm that learns from them.

They are read in the order in which they finished, by the store's change feed, so that what finishes later comes later
and nothing is read twice.
"""

from contextlib import suppress

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Record, Rollout

PREFIX = "experiment:"
"""Begins a source that is an experiment, and no algorithm."""

BATCH = 256
"""Rollouts of one answer at most."""

_PAGE = 1000
_FINISHED = ("succeeded", "failed")


class Finished(Record, frozen=True, kw_only=True):
    """Some rollouts of an experiment.

    Attributes:
        rollouts: Training rollouts in the order in which they finished.
        cursor: Position in the change feed behind the last of them.
        is_all: Nothing more had finished when they were read.
    """

    rollouts: list[Rollout]
    cursor: int
    is_all: bool


def experiment_of(source: str) -> str:
    """The experiment that a source names, ``""`` if it names an algorithm."""
    return source.removeprefix(PREFIX) if source.startswith(PREFIX) else ""


async def finished(store: Store, experiment: str, *, after: int, limit: int = BATCH) -> Finished:
    """The next training rollouts of an experiment that finished above the cursor ``after``; ``limit`` at most."""
    found: list[Rollout] = []
    while changes := await store.changes(after=after, limit=_PAGE):
        for change in changes:
            after = change.cursor
            is_end = change.kind == "rollout" and change.status in _FINISHED
            if is_end and change.experiment == experiment:
                with suppress(NotFoundError):  # removed meanwhile
                    (rollout,) = await store.rollouts(RolloutQuery(ids=(change.key,)))
                    found += [rollout] if rollout.mode == "train" else []
            if len(found) == limit:
                return Finished(rollouts=found, cursor=after, is_all=False)
    return Finished(rollouts=found, cursor=after, is_all=True)
