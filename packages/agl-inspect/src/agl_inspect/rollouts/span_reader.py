"""Reads a rollout's spans in small pages, because there may be thousands of calls, each with a long conversation."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol, TypeVar

from msgspec.structs import replace

from agl import semconv
from agl.contracts import Recording, RolloutQuery, SpanQuery, Store
from agl.episodes import Enclosing, ScoreOptions, build_episode
from agl.errors import NotFoundError
from agl.schemas import Attempt, Episode, Json, Rollout, Span
from agl.stores import reward_of as attempt_reward
from agl_inspect.records.state import rules_of

_PAGE = 16
CHOSEN_PAGE = 16
"""Number of spans per page if spans are selected, because the store then searches the attempt."""

_KEPT = 2
"""Number of pages that stay in memory, for spans that are read in another order than the recorded one."""

_NAMING = (
    *(semconv.AGENT_NAME, semconv.NODE, semconv.ROLE, semconv.TOOL_NAME, semconv.WORKFLOW_NAME, semconv.OPERATION),
    semconv.FRAMEWORK_SPAN_ID,
)


class SpanReader:
    """Reads the spans of one rollout, with at most a few pages of spans in memory.

    To select the spans of an agent, it reads the names of all spans once, and finds the agent of each span itself. The
    store would search the whole attempt again for every page.

    Args:
        store: The store.
        rollout_id: The rollout.
        attempt_id: The attempt; ``None`` for the deciding one, ``""`` for the spans that belong to no attempt.
        chosen: Selects spans by name, agent and kind; ``None`` for all spans.
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
        """Yield the selected spans in order of ``sequence``."""
        async for span in self.behind(0):
            yield span

    async def behind(self, sequence: int) -> AsyncIterator[Span]:
        """Yield the selected spans with a ``sequence`` above the given one, in order."""
        around = await self._actors() if self._agent else None
        async for span in self._all(self._chosen, sequence):
            if around is None or around.who(span).agent == self._agent:
                yield span

    async def at(self, sequence: int) -> Span:
        """Return the span with this ``sequence``; raises :class:`NotFoundError` if it has been removed meanwhile."""
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
    """Return a span with only the attributes that name actors, which suffices to find the agents of other spans."""
    attributes = {name: span.attributes[name] for name in _NAMING if name in span.attributes}
    return replace(span, attributes=attributes, events=(), call=None, reward=None)


def without_text(span: Span) -> Span:
    """Return a span without its call's request and response, which are large and do not affect an episode."""
    if span.call is None:
        return span
    response: Json = None if span.call.response is None else {}
    return replace(span, call=replace(span.call, request={}, response=response))


async def read_episode(
    store: Store,
    rollout: Rollout,
    attempts: Sequence[Attempt],
    *,
    agent_match: str | None = None,
    policy: str | None = None,
) -> tuple[Episode, list[Span], ScoreOptions]:
    """Build a rollout's episode by the rules of its experiment; the calls come without requests and responses.

    Returns:
        The episode, all spans of the rollout with or without an attempt, and the rules for rewards.
    """
    readers = [SpanReader(store, rollout.rollout_id, name) for name in ("", *(one.attempt_id for one in attempts))]
    spans = [without_text(span) for reader in readers async for span in reader]
    deciding = next((attempt for attempt in attempts if attempt.attempt_id == rollout.attempt_id), None)
    rules = await rules_of(store, rollout.experiment)
    # The record does not say which processor the algorithm read; each policy has one.
    chosen = replace(rules, processor=None)
    episode = build_episode(rollout, deciding, spans, agent_match=agent_match, policy=policy, options=chosen)
    return episode, spans, rules.score


def reward_of(recording: Recording) -> float | None:
    """Return the reward that the store computed for a rollout's deciding or running attempt; ``None`` without one."""
    deciding = recording.rollout.attempt_id
    return attempt_reward(next((each for each in recording.attempts if each.attempt_id == deciding), None))


class _Spanning(Protocol):
    @property
    def span_id(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def sequence(self) -> int: ...


S = TypeVar("S", bound=_Spanning)


def in_tree(spans: Sequence[S]) -> Iterator[tuple[int, S, bool]]:
    """Yield (depth, span, is circular): each span before its children, and siblings in order of their start.

    Spans whose parents form a circle come last, with depth 0; only for them the third value is true.
    """
    known = {span.span_id for span in spans}
    children: dict[str, list[S]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.sequence)):
        parent = span.parent_id if span.parent_id in known and span.parent_id != span.span_id else None
        children.setdefault(parent or "", []).append(span)
    waiting = [(0, span) for span in reversed(children.pop("", []))]
    while waiting:
        depth, span = waiting.pop()
        yield depth, span, False
        waiting.extend((depth + 1, child) for child in reversed(children.pop(span.span_id, [])))
    for left in children.values():
        yield from ((0, span, True) for span in left)
