"""Reads rollouts and spans in small pages: a rollout may have thousands of calls, each a long conversation."""

import re
from collections.abc import AsyncIterator, Iterable, Sequence

from msgspec.structs import replace

from agl import semconv
from agl.contracts import ExperimentRecord, Recording, RolloutQuery, SpanChoice, SpanQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Attempt, Rollout, Span

_PAGE = 32

NOTE = "note"
"""The name of a span in which a person notes something about a rollout; it belongs to none of the attempts."""

TAG = re.compile(r"((?<!\S)#[\w-]+)")
"""A word of a note that is a tag."""

NOTES = 20
"""The most notes of a rollout that a list of rollouts reads."""

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


def notes_among(spans: Iterable[Span]) -> list[str]:
    """Return the notes of people among a rollout's spans, in the order of their writing."""
    notes = (span for span in spans if span.name == NOTE and not span.attempt_id)
    return [str(span.attributes.get(semconv.MESSAGE, "")) for span in notes]


async def notes_of(store: Store, found: Sequence[Recording]) -> dict[str, list[str]]:
    """Read the notes of people about rollouts, by the rollout's id."""
    query = RolloutQuery(ids=tuple(recording.rollout.rollout_id for recording in found), limit=max(1, len(found)))
    page = await store.recordings(query, spans=SpanQuery(attempt_id="", name=NOTE, limit=NOTES)) if found else []
    return {recording.rollout.rollout_id: notes_among(recording.spans) for recording in page}


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
