"""Reads a rollout's spans in small pages: a rollout may have thousands of calls, and each a long conversation."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from agl import semconv
from agl.contracts import RolloutQuery, SpanQuery, Store
from agl.episodes import Enclosing
from agl.errors import NotFoundError
from agl.schemas import Span

_PAGE = 16
CHOSEN_PAGE = 16
"""Spans of a page that are chosen among others, for which the store looks through the attempt."""

_KEPT = 2
"""Pages that are kept, for spans that are wanted in another order than they were recorded."""

_NAMING = (
    *(semconv.AGENT_NAME, semconv.NODE, semconv.ROLE, semconv.TOOL_NAME, semconv.WORKFLOW_NAME, semconv.OPERATION),
    semconv.FRAMEWORK_SPAN_ID,
)


class SpanReader:
    """Reads the spans of one rollout, of which no more than a few pages are in memory.

    For an agent's spans it reads the names of all spans once, and finds the agent around each by itself: the store
    would look through the whole attempt again for every page.

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
        self._agent = chosen.agent if chosen else ""
        rest = SpanQuery() if chosen is None else replace(chosen, agent="", attempt_id=None, after=0, limit=1000)
        self._chosen = None if rest == SpanQuery() else replace(rest, attempt_id=attempt_id, limit=CHOSEN_PAGE)
        self._around: Enclosing | None = None
        self._kept: list[list[Span]] = []

    async def __aiter__(self) -> AsyncIterator[Span]:
        """All spans in order of ``sequence``."""
        async for span in self.behind(0):
            yield span

    async def behind(self, sequence: int) -> AsyncIterator[Span]:
        """All spans whose ``sequence`` is higher, in its order."""
        around = await self._actors() if self._agent else None
        async for span in self._all(self._chosen, sequence):
            if around is None or around.who(span).agent == self._agent:
                yield span

    async def at(self, sequence: int) -> Span:
        """Return the span of that ``sequence``; raises :class:`NotFoundError` if it has been removed meanwhile."""
        for page in self._kept:
            if page[0].sequence <= sequence <= page[-1].sequence:
                break
        else:
            page = await self._page(self._chosen, sequence - 1)
            self._kept = [*self._kept[1 - _KEPT :], page]
        for span in page:
            if span.sequence == sequence:
                return span
        raise NotFoundError("span", str(sequence), f"it was removed from rollout {self._rollout_id} just now")

    async def _actors(self) -> Enclosing:
        if self._around is None:
            self._around = Enclosing([_names_of(span) async for span in self._all(None, 0)])
        return self._around

    async def _all(self, chosen: SpanQuery | None, after: int) -> AsyncIterator[Span]:
        while page := await self._page(chosen, after):
            for span in page:
                yield span
            if len(page) < (chosen.limit if chosen else _PAGE):
                return
            after = page[-1].sequence

    async def _page(self, chosen: SpanQuery | None, after: int) -> list[Span]:
        if chosen is None:
            return await self._store.spans(self._rollout_id, attempt_id=self._attempt_id, after=after, limit=_PAGE)
        query = RolloutQuery(ids=(self._rollout_id,))
        (found,) = await self._store.recordings(query, spans=replace(chosen, after=after))
        return found.spans


def _names_of(span: Span) -> Span:
    """Return a span without its contents, to find the actors around others."""
    attributes = {name: span.attributes[name] for name in _NAMING if name in span.attributes}
    return replace(span, attributes=attributes, events=(), call=None, reward=None)
