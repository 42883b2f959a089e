"""Reads a rollout's spans in small pages: a rollout may have thousands of calls, and each a long conversation."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from agl.contracts import RolloutQuery, SpanQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Span

_PAGE = 16
_CHOSEN_PAGE = 32
"""Spans of a page that are chosen among others, for which the store looks through the attempt."""

_KEPT = 4
"""Pages that are kept, for spans that are wanted in another order than they were recorded."""


class SpanReader:
    """Reads the spans of one rollout, of which no more than a few pages are in memory.

    Args:
        store: The store.
        rollout_id: The rollout.
        attempt_id: The attempt, ``None`` for the deciding one, ``""`` for the spans of the rollout alone.
        chosen: Selects spans by name, agent and kind; ``None`` for all of them.
    """

    def __init__(
        self, store: Store, rollout_id: str, attempt_id: str | None, *, chosen: SpanQuery | None = None
    ) -> None:
        self._store, self._rollout_id, self._attempt_id = store, rollout_id, attempt_id
        self._chosen = chosen and replace(chosen, attempt_id=attempt_id, limit=_CHOSEN_PAGE)
        self._limit = _CHOSEN_PAGE if chosen else _PAGE
        self._kept: list[list[Span]] = []

    async def __aiter__(self) -> AsyncIterator[Span]:
        """All spans in order of ``sequence``."""
        after = 0
        while page := await self._page(after):
            for span in page:
                yield span
            if len(page) < self._limit:
                return
            after = page[-1].sequence

    async def at(self, sequence: int) -> Span:
        """Return the span of that ``sequence``; raises :class:`NotFoundError` if it has been removed meanwhile."""
        for page in self._kept:
            if page[0].sequence <= sequence <= page[-1].sequence:
                break
        else:
            page = await self._page(sequence - 1)
            self._kept = [*self._kept[1 - _KEPT :], page]
        for span in page:
            if span.sequence == sequence:
                return span
        raise NotFoundError("span", str(sequence), f"it was removed from rollout {self._rollout_id} just now")

    async def _page(self, after: int) -> list[Span]:
        if self._chosen is None:
            return await self._store.spans(self._rollout_id, attempt_id=self._attempt_id, after=after, limit=_PAGE)
        query = RolloutQuery(ids=(self._rollout_id,))
        (found,) = await self._store.recordings(query, spans=replace(self._chosen, after=after))
        return found.spans
