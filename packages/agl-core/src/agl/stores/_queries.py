"""Selects rollouts and spans by queries, in the same way for all stores, and reads all pages of a query."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from agl import semconv
from agl._actors import NAMING, Enclosing
from agl.contracts import Recording, RolloutQuery, SpanChoice, SpanQuery, Store
from agl.errors import InvalidQueryError
from agl.schemas import Rollout, Span
from agl.schemas import _codec as codec

MAX_COUNT = (1 << 63) - 1
"""The largest integer that every store can hold."""

PAGE = 10_000
"""The number of spans that :func:`all_spans` requests at once."""


def check_page(given: Mapping[str, object], *queries: object) -> None:
    """Raise :class:`InvalidQueryError` for an impossible ``limit`` or ``after``, in ``given`` or in a query.

    Args:
        given: Keyword arguments of a store's method; some may be queries.
        queries: Positional arguments; arguments other than queries are ignored.
    """
    # Checked in one place for all methods, because every database answers differently to a number
    # that is too large.
    for query in (*queries, *given.values()):
        if isinstance(query, RolloutQuery | SpanQuery):
            check_page({"limit": query.limit, "after": query.after})
        if isinstance(query, RolloutQuery):
            _check_start(query)
    for name in ("limit", "after"):
        if isinstance(value := given.get(name), int) and not 0 <= value <= MAX_COUNT:
            raise InvalidQueryError(f"{name} = {value}; choose between 0 and {MAX_COUNT}")


def _check_start(query: RolloutQuery) -> None:
    """Raise :class:`InvalidQueryError` if ``after_value`` has another type than the field to sort by."""
    is_text = isinstance(query.after_value, str)
    if query.after and query.sort != "rollout_id" and is_text != (query.sort == "status"):
        raise InvalidQueryError(
            f"after_value = {query.after_value!r} is no {query.sort} of a rollout; take the query of a page from "
            "RolloutQuery.next, which sets it"
        )


def select(rollouts: Sequence[Rollout], query: RolloutQuery) -> list[Rollout]:
    """Return one page of a query: the matching rollouts in the query's order, up to its limit."""
    wanted = [rollout for rollout in rollouts if is_wanted(rollout, query)]
    wanted.sort(key=sort_key(query), reverse=query.is_newest_first)
    return wanted[: query.limit]


def sort_key(query: RolloutQuery) -> Callable[[Rollout], tuple[Any, str]]:
    """Return the function that computes a rollout's sort key for a query."""
    # The id decides between equal values, so that every order is total and pages do not overlap.
    return attrgetter(query.sort, "rollout_id")


def start_of(query: RolloutQuery) -> tuple[Any, str]:
    """The sort key of the previous page's last rollout, after which the query's page starts."""
    return query.after if query.sort == "rollout_id" else query.after_value, query.after


def is_wanted(rollout: Rollout, query: RolloutQuery) -> bool:
    """True if the rollout matches the query, whose limit and ids are ignored."""
    key, start = sort_key(query)(rollout), start_of(query)
    is_behind = not query.after or (key < start if query.is_newest_first else key > start)
    return (
        is_behind
        # The task as JSON text, as a person sees it in a console.
        and (query.contains in rollout.rollout_id or query.contains in codec.to_json(rollout.task).decode())
        and query.experiment in (None, rollout.experiment)
        and query.mode in (None, rollout.mode)
        and query.group_id in (None, rollout.group_id)
        and (not query.status or rollout.status in query.status)
    )


def bare(span: Span) -> Span:
    """Return a copy of the span without contents, which suffices to find the actors around other spans."""
    names = {key: value for key, value in span.attributes.items() if key in NAMING or key == semconv.FRAMEWORK_SPAN_ID}
    if span.call is not None or span.reward is not None:  # else its name would be that of an operation around others
        names.setdefault(semconv.OPERATION, "")
    return replace(span, attributes=names, events=(), call=None, reward=None)


def is_chosen(span: Span, query: SpanQuery, around: Enclosing) -> bool:
    """True if the query selects the span; the query's attempt and sequence are ignored."""
    # invoke_agent is an agent, execute_tool a tool.
    operation = str(span.attributes.get(semconv.OPERATION, "")).rpartition("_")[2]
    kind = "call" if span.call is not None else "reward" if span.reward is not None else operation
    is_named = query.name in ("", span.name) and query.contains in span.name
    return is_named and query.kind in ("", kind) and query.agent in ("", around.who(span).agent)


async def all_spans(store: Store, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
    """Read all spans of one attempt in order of ``sequence``; by default of the deciding or running attempt.

    Raises :class:`agl.errors.NotFoundError` for an unknown rollout.
    """
    spans: list[Span] = []
    while True:
        after = spans[-1].sequence if spans else 0
        page = await store.spans(rollout_id, attempt_id=attempt_id, after=after, limit=PAGE)
        spans.extend(page)
        # A page that is not full is the last one; asking for another would cost a request.
        if len(page) < PAGE:
            return spans


async def read_recordings(
    store: Store, query: RolloutQuery, *, spans: SpanChoice = "deciding"
) -> AsyncIterator[Recording]:
    """Yield all rollouts that match a query, from all of its pages, with their attempts and the selected spans.

    With a :class:`~agl.contracts.SpanQuery`, each rollout has only the first page of the selected spans.

    Raises :class:`agl.errors.NotFoundError` for an unknown id in ``query.ids``.
    """
    # Stop after the last id, because a further request might name ids that were removed meanwhile.
    left = len(query.ids)
    while page := await store.recordings(query, spans=spans):
        for recording in page:
            is_paged = recording.is_whole or isinstance(spans, SpanQuery)
            yield recording if is_paged else await _whole(store, recording, spans)
        query = query.next(page[-1].rollout)
        left -= len(page)
        if query.ids and not left:
            return


def is_readable(recording: Recording) -> bool:
    """False if an attempt or a span of the recording stands for a damaged one; a copy of it would lose data."""
    is_damaged = any(each.error is not None and each.error.type == semconv.UNREADABLE for each in recording.attempts)
    return not is_damaged and all(span.name != semconv.UNREADABLE for span in recording.spans)


async def _whole(store: Store, recording: Recording, spans: SpanChoice) -> Recording:
    rollout_id = recording.rollout.rollout_id
    attempts = [None] if spans == "deciding" else ["", *(attempt.attempt_id for attempt in recording.attempts)]
    found = [span for attempt_id in attempts for span in await all_spans(store, rollout_id, attempt_id)]
    return replace(recording, spans=found, is_whole=True)
