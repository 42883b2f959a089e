"""Reads the spans of one attempt in small pages: a rollout may have thousands of calls, each a long conversation."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from agl.contracts import RolloutQuery, Store
from agl.episodes import build_episode
from agl.errors import NotFoundError
from agl.schemas import Attempt, Episode, Json, Rollout, Span

_PAGE = 32


async def rollout_of(store: Store, rollout_id: str) -> tuple[Rollout, list[Attempt]]:
    """Read a rollout and its attempts; raises :class:`NotFoundError`."""
    (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
    return rollout, await store.attempts(rollout_id)


def attempt_of(rollout: Rollout, attempts: list[Attempt], number: int | None) -> Attempt | None:
    """Return the attempt of that number, by default the one that runs or decided; ``None`` if none was started.

    Raises:
        NotFoundError: The rollout has no attempt of that number.
    """
    if number is None:
        return next((attempt for attempt in attempts if attempt.attempt_id == rollout.attempt_id), None)
    found = next((attempt for attempt in attempts if attempt.number == number), None)
    if found is None:
        raise NotFoundError("attempt", str(number), f"the rollout {rollout.rollout_id} has {len(attempts)}")
    return found


async def spans_of(store: Store, rollout_id: str, attempt_id: str, *, after: int = 0) -> AsyncIterator[Span]:
    """Read the spans of an attempt in order of ``sequence``; the id ``""`` is for those of the rollout alone."""
    while page := await store.spans(rollout_id, attempt_id=attempt_id, after=after, limit=_PAGE):
        for span in page:
            yield span
        if len(page) < _PAGE:
            return
        after = page[-1].sequence


async def episode_of(store: Store, rollout: Rollout, attempts: list[Attempt]) -> tuple[Episode, list[Span]]:
    """Build a rollout's episode, and return it with its spans, which have lost the texts of their calls."""
    ids = ("", *(attempt.attempt_id for attempt in attempts))
    spans = [without_text(span) for each in ids async for span in spans_of(store, rollout.rollout_id, each)]
    return build_episode(rollout, attempt_of(rollout, attempts, None), spans), spans


def without_text(span: Span) -> Span:
    """Drop a call's request and response, which decide nothing and are most of its size."""
    if span.call is None:
        return span
    response: Json = None if span.call.response is None else {}
    return replace(span, call=replace(span.call, request={}, response=response))
