"""Reads all pages of a store's paged answers."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from agl.contracts import Recording, RolloutQuery, SpanChoice, SpanQuery, Store
from agl.schemas import Span

PAGE = 10_000


async def all_spans(store: Store, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
    """All spans of one attempt in order of ``sequence``, by default of the deciding or running one.

    Raises :class:`agl.errors.NotFoundError` for an unknown rollout.
    """
    spans: list[Span] = []
    while True:
        after = spans[-1].sequence if spans else 0
        page = await store.spans(rollout_id, attempt_id=attempt_id, after=after, limit=PAGE)
        spans.extend(page)
        if len(page) < PAGE:
            return spans


async def read_recordings(
    store: Store, query: RolloutQuery, *, spans: SpanChoice = "deciding"
) -> AsyncIterator[Recording]:
    """All rollouts that match a query, whatever its limit, with attempts and spans, in as few requests as possible.

    With a :class:`~agl.contracts.SpanQuery` each rollout comes with the first page of its spans.

    Raises :class:`agl.errors.NotFoundError` for an unknown id in ``query.ids``.
    """
    left = len(query.ids)
    while page := await store.recordings(query, spans=spans):
        for recording in page:
            is_paged = recording.is_whole or isinstance(spans, SpanQuery)
            yield recording if is_paged else await _whole(store, recording, spans)
        query = query.next(page[-1].rollout)
        left -= len(page)
        if query.ids and not left:
            return


async def _whole(store: Store, recording: Recording, spans: SpanChoice) -> Recording:
    rollout_id = recording.rollout.rollout_id
    attempts = [None] if spans == "deciding" else ["", *(attempt.attempt_id for attempt in recording.attempts)]
    found = [span for attempt_id in attempts for span in await all_spans(store, rollout_id, attempt_id)]
    return replace(recording, spans=found, is_whole=True)
