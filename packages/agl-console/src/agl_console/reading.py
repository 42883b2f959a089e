"""Reads rollouts and spans in small pages: a rollout may have thousands of calls, each a long conversation."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from agl.contracts import ExperimentRecord, Recording, RolloutQuery, SpanChoice, Store
from agl.errors import NotFoundError
from agl.schemas import Attempt, Rollout

_PAGE = 32

_PAGE_BYTES = 2 << 20
_PAGES = 4
"""The most pages of recordings that one view reads, each with ``_PAGE_BYTES`` of spans."""


async def run_of(store: Store, name: str) -> ExperimentRecord:
    """Read the record of a run, which is an experiment; raises :class:`NotFoundError` if there is no such run."""
    records = await store.experiments(name)
    if not records:
        raise NotFoundError("run", name, "agl console --json / lists those of the store")
    return records[0]


async def newest_recordings(
    store: Store, query: RolloutQuery, most: int, *, spans: SpanChoice = "all"
) -> AsyncIterator[Recording]:
    """Yield up to ``most`` rollouts of a query with their spans; fewer if these are large."""
    for _ in range(_PAGES):
        page = await store.recordings(replace(query, limit=most), spans=spans, max_bytes=_PAGE_BYTES)
        for recording in page:
            yield recording
        most -= len(page)
        if not page or most <= 0:
            return
        query = query.next(page[-1].rollout)


async def rollout_of(store: Store, rollout_id: str) -> tuple[Rollout, list[Attempt]]:
    """Read a rollout and its attempts; raises :class:`NotFoundError` if there is no such rollout."""
    (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
    return rollout, await store.attempts(rollout_id)


def attempt_of(rollout: Rollout, attempts: list[Attempt], number: int | None) -> Attempt | None:
    """Return the attempt with this number, by default the running or deciding one; ``None`` if none was started.

    Raises:
        NotFoundError: The rollout has no attempt with this number.
    """
    if number is None:
        return next((attempt for attempt in attempts if attempt.attempt_id == rollout.attempt_id), None)
    found = next((attempt for attempt in attempts if attempt.number == number), None)
    if found is None:
        raise NotFoundError("attempt", str(number), f"the rollout {rollout.rollout_id} has {len(attempts)}")
    return found
