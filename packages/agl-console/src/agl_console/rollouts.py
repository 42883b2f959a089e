"""The view of rollouts: a page of those that match the filters, with a histogram of their rewards.

The store selects by experiment, status, mode, group and text, and finds the rollouts of an algorithm's step by their
ids. All other filters are applied here, for at most ``SECONDS`` per page, so that a page costs the same in a store of
any size. The page shows how many rollouts were checked, and the next page continues from there.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec.structs import asdict, replace

from agl.contracts import Recording, RolloutQuery, SpanQuery, Store
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.schemas import Mode, Record, Reward, RolloutStatus, Span, to_json
from agl_console.reading import TAG, notes_of
from agl_inspect.records.names import id_prefix
from agl_inspect.rollouts.span_reader import reward_of
from agl_inspect.rollouts.step_tallies import MOST_AGENTS, read_tallies
from agl_inspect.rollouts.training import training_of
from agl_inspect.statistics import interval
from agl_inspect.text import short

PAGE = 50
"""The most rollouts on a page."""

SECONDS = 1.5
"""A page that is not full after this time is shown as it is."""

_CHUNK = 200
_CHUNK_WITH_SPANS, _BYTES_WITH_SPANS = 50, 2 << 20
"""If spans must be read: the most rollouts and bytes that are read at once."""

_MODES: tuple[Mode, ...] = ("test", "train", "val")
"""The modes of rollouts, in the order in which the rollout ids of a step sort."""

_BINS = 12
_FEW = 5
"""Up to this many distinct rewards have a bar each."""

_TASK = 160
"""The most characters of a task in the table."""

_NOT_SAID = frozenset({"role", "type", "id", "tool_call_id", "model", "object", "finish_reason"})
"""Keys of requests and answers whose values nobody said."""

_AROUND = 60
"""Characters that are shown on either side of words that were found."""

Positive = Annotated[int, msgspec.Meta(ge=0)]


Reject = Literal[
    "",
    "cut_off",
    "error",
    "incomplete",
    "superseded",
    "missing_token_ids",
    "length_mismatch",
    "empty_response",
    "non_token_input",
    "late",
    "not_final",
]
"""The reasons in :attr:`agl.schemas.Transition.reject` that follow from the record alone, whatever trains on it.

``cut_off`` selects calls whose answers were cut off at the token limit; they may train.
"""


class RolloutsFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page.

    Attributes:
        text: A part of the rollout's id, or of its task as JSON.
        said: A part of a message, a tool's call or result, an error or a feedback, in any case of its letters.
        step: The algorithm's step, or the first one if ``until`` is given.
        until: The last step.
        low: Select rewards at or above this.
        high: Select rewards below this.
        reward: ``none`` selects the rollouts without a reward.
        agent: An agent, node or role that made a call.
        note: A part of a person's note, such as ``#loop``.
        taught: ``nothing`` selects the rollouts that changed nothing in the steps that trained.
        reject: The reject reason of one of the rollout's calls.
        part: A part of the reward with its value, such as ``exact = 0``.
        after: The last rollout id of the previous page.
        at: The time of creation of that rollout.
    """

    experiment: str = ""
    status: RolloutStatus | Literal[""] = ""
    mode: Mode | Literal[""] = ""
    group: str = ""
    text: str = ""
    said: str = ""
    algorithm: str = ""
    step: Positive | None = None
    until: Positive | None = None
    agent: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None
    reward: Literal["", "none"] = ""
    taught: Literal["", "nothing"] = ""
    reject: Reject = ""
    part: Annotated[str, msgspec.Meta(pattern="^$|^[^=]+=[^=]+$")] = ""
    after: str = ""
    at: float = 0.0

    @property
    def steps(self) -> range | None:
        """The chosen steps; ``None`` for all rollouts, also those without a step."""
        if self.step is None and self.until is None:
            return None
        first = self.step or 0
        return range(first, (first if self.until is None else self.until) + 1)

    @property
    def needs_spans(self) -> bool:
        """True if spans must be read to apply the filters."""
        return bool(self.reject or self.said)

    def admits(self, reward: float | None) -> bool:
        """Return true if the filters select this reward."""
        if self.reward == "none":
            return reward is None
        if self.low is None and self.high is None:
            return True
        if reward is None:
            return False
        return (self.low is None or reward >= self.low) and (self.high is None or reward < self.high)


class RolloutRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rollout in the table.

    Attributes:
        task: The start of the task as JSON.
        seconds: Time from start to end; ``None`` before the end.
        error: The last attempt's error, such as ``ValueError: no``.
        found: The text around the first words that the filter ``said`` found; ``""`` without that filter.
        found_at: The number of the span with these words.
        notes: What people noted about the rollout.
        parts: The parts of the last reward that has some.
        feedback: The start of the reason of the last reward that has one.
    """

    rollout_id: str
    experiment: str
    mode: str
    status: str
    algorithm: str
    step: int | None
    group_id: str
    reward: float | None
    attempts: int
    created_at: float
    seconds: float | None
    task: str
    error: str
    found: str
    found_at: int
    notes: list[str]
    parts: dict[str, float | None]
    feedback: str


class Bin(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A bar of a histogram: the rewards from ``low`` to ``high``; both are ``None`` for rollouts without a reward.

    The ends of a bar for a single value are equal.

    Attributes:
        query: The query that selects the bar's rollouts.
    """

    low: float | None
    high: float | None
    count: int
    query: dict[str, str]


class Summary(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Figures of the matching rollouts among those checked.

    Attributes:
        rollouts: The number of matching rollouts.
        tasks: The number of groups with a reward among them.
        mean: Mean over tasks of the mean of each task's rollouts; ``None`` without any reward.
        low: Lower end of the 95 % interval over tasks; ``None`` for fewer than two tasks.
        high: Upper end of that interval.
    """

    rollouts: int
    tasks: int
    mean: float | None
    low: float | None
    high: float | None


class Picked(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A filter that is set, as a phrase; ``without`` is the query without this filter."""

    words: str
    without: dict[str, str]


class RolloutsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A page of rollouts, the newest first.

    Attributes:
        looked_through: The number of rollouts checked for the page.
        nothing: The reason why no rollout is on the page, if one filter alone explains it.
        unsearched: The number of older rollouts that were not checked; ``None`` if it is unknown.
        histogram: The rewards of the matching rollouts.
        agents: The agents of the chosen run, those with the most rollouts first, with the number of these rollouts.
        next: The query of the next page; empty on the last.
    """

    filters: dict[str, str]
    picked: list[Picked]
    rollouts: list[RolloutRow]
    summary: Summary
    histogram: list[Bin]
    agents: dict[str, int]
    looked_through: int
    nothing: "Nothing | None"
    unsearched: int | None
    next: dict[str, str]


class Nothing(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The reason why no rollout fits the filters, and a query that finds others, with a phrase for its link."""

    words: str
    others: str = ""
    query: dict[str, str] = {}


async def rollouts_view(store: Store, chosen: RolloutsFilter) -> RolloutsView:
    """Read a page of rollouts; raises :class:`ConfigError` for a range of rewards or steps that holds nothing."""
    if chosen.low is not None and chosen.high is not None and chosen.low >= chosen.high:
        raise ConfigError(f"no reward is at least {chosen.low:g} and below {chosen.high:g}; exchange low and high")
    if chosen.steps is not None and not chosen.steps:
        raise ConfigError(f"no step is from {chosen.step} to {chosen.until}; exchange step and until")
    end = time.monotonic() + SECONDS
    of_steps = await _step(store, chosen, end)
    seen = of_steps or await _scan(store, chosen, end)
    page = seen.fitting[:PAGE]
    filters = _filters(chosen)
    notes = await notes_of(store, [recording for recording, _ in page])
    last = page[-1][0] if len(seen.fitting) > PAGE else None if seen.is_end else seen.last
    agents = await _agents(store, chosen.experiment)
    rewards = await _rewards(store, [recording for recording, _ in page])
    is_known = not (chosen.after or of_steps)
    return RolloutsView(
        filters=filters,
        picked=_picked(filters),
        rollouts=[
            _row(one, value, chosen.said, notes.get(one.rollout.rollout_id, []), rewards[one.rollout.rollout_id])
            for one, value in page
        ],
        summary=_summary(seen.fitting),
        histogram=_histogram([reward for _, reward in seen.fitting], filters),
        agents=agents,
        looked_through=seen.count,
        nothing=None if page else await _nothing(store, chosen, agents, is_end=seen.is_end),
        unsearched=0 if seen.is_end else await store.count_rollouts(_query(chosen)) - seen.count if is_known else None,
        next={**filters, "after": last.rollout.rollout_id, "at": repr(last.rollout.created_at)} if last else {},
    )


async def _nothing(store: Store, chosen: RolloutsFilter, agents: Mapping[str, int], *, is_end: bool) -> Nothing | None:
    records = await store.experiments(chosen.experiment) if chosen.experiment else []
    made = [each.algorithm for record in records for each in await read_tallies(store, record)]
    if chosen.agent and agents and chosen.agent not in agents:
        return Nothing(words=f"No agent is named {chosen.agent} in this run; agents here: {', '.join(agents)}.")
    if records and chosen.algorithm not in ("", *made):
        return Nothing(
            words=f"{chosen.algorithm} has no rollouts in this run: an algorithm that trains on data makes none."
        )
    if chosen.status != "failed" or not is_end:
        return None
    others = replace(chosen, status="", after="", at=0.0)
    end = time.monotonic() + SECONDS
    seen = await _step(store, others, end) or await _scan(store, others, end)
    rewards = [reward for _, reward in seen.fitting if reward is not None]
    best = max(rewards, default=0.0)
    if not (low := sum(reward < best for reward in rewards)):
        return Nothing(words="No rollout crashed or timed out.")
    words = f"{'' if seen.is_end else 'at least '}{low} with a reward below the best, {best:.4g}"
    return Nothing(words="No rollout crashed or timed out.", others=words, query=_filters(replace(others, high=best)))


class _Seen(Record, frozen=True, kw_only=True):
    """The rollouts checked so far.

    Attributes:
        fitting: Rollouts that match the filters, with their rewards.
        count: The number of rollouts that were checked.
        last: The last rollout that was checked.
        is_end: True if there are no more rollouts.
    """

    fitting: list[tuple[Recording, float | None]]
    count: int
    last: Recording | None
    is_end: bool


async def _scan(store: Store, chosen: RolloutsFilter, end: float) -> _Seen:
    """Check the rollouts, newest first, until the page is full or the clock is at ``end``."""
    query = _query(chosen)
    seen = _Seen(fitting=[], count=0, last=None, is_end=False)
    while page := await _page(store, query, chosen):
        seen = await _with(seen, store, page, chosen)
        query = query.next(page[-1].rollout)
        if len(seen.fitting) > PAGE or time.monotonic() >= end:
            return replace(seen, is_end=not await store.rollouts(replace(query, limit=1)))
    return replace(seen, is_end=True)


async def _step(store: Store, chosen: RolloutsFilter, until: float) -> _Seen | None:
    """Find the rollouts of steps by their ids; ``None`` if the filters name no steps, or these have no rollouts."""
    records = await store.experiments(chosen.experiment) if chosen.experiment and chosen.algorithm else []
    if not records or not chosen.steps:
        return None
    seen = _Seen(fitting=[], count=0, last=None, is_end=True)
    is_found = False
    for mode in (chosen.mode,) if chosen.mode else _MODES:
        first, end = (
            id_prefix(chosen.experiment, records[0].run, chosen.algorithm, mode, step=step)
            for step in (chosen.steps.start, chosen.steps.stop)
        )
        is_found = is_found or first <= chosen.after < end
        start = {"after": max(first, chosen.after), "after_value": ""}
        query = replace(_query(chosen), mode=mode, sort="rollout_id", is_newest_first=False, **start)
        while page := await _page(store, query, chosen):
            own = [recording for recording in page if first <= recording.rollout.rollout_id < end]
            seen = await _with(seen, store, own, chosen)
            if len(own) < len(page):
                break
            if time.monotonic() >= until:
                return replace(seen, is_end=False)
            query = query.next(page[-1].rollout)
    return seen if seen.count or is_found else None


async def _page(store: Store, query: RolloutQuery, chosen: RolloutsFilter) -> list[Recording]:
    """Read the next page of rollouts; with their spans if a filter needs them."""
    if not chosen.needs_spans:
        return await store.recordings(query, spans="none")
    return await store.recordings(replace(query, limit=_CHUNK_WITH_SPANS), spans="all", max_bytes=_BYTES_WITH_SPANS)


def _has_reject(recording: Recording, reason: Reject) -> bool:
    """Return true if a call has this reject reason; of a huge rollout only the first spans are read."""
    deciding = [each for each in recording.attempts if each.attempt_id == recording.rollout.attempt_id]
    episode = build_episode(recording.rollout, deciding[0] if deciding else None, recording.spans)
    return any(call.is_truncated if reason == "cut_off" else call.reject == reason for call in episode.transitions)


async def _with(seen: _Seen, store: Store, page: Sequence[Recording], chosen: RolloutsFilter) -> _Seen:
    """Return ``seen`` extended by a page of rollouts; those that match the filters are added."""
    found = [one for one in page if _is_of_step(one, chosen)]
    if chosen.reject:
        found = [one for one in found if _has_reject(one, chosen.reject)]
    if chosen.note:
        notes = await notes_of(store, found)
        found = [one for one in found if _has_note(notes.get(one.rollout.rollout_id, []), chosen.note)]
    if chosen.said:
        own = ((one, next((span for span in one.spans if _holds(span, chosen.said)), None)) for one in found)
        found = [replace(one, spans=[span]) for one, span in own if span is not None]
    elif chosen.reject:
        found = [replace(one, spans=[]) for one in found]
    if chosen.agent:
        found = await _with_spans(store, found, SpanQuery(agent=chosen.agent, limit=1), lambda spans: bool(spans))
    if chosen.part:
        found = await _with_spans(store, found, _REWARDS, lambda spans: _has_part(spans, chosen.part))
    if chosen.taught:
        found = await _with_spans(store, found, SpanQuery(attempt_id=""), _taught_nothing)
    rewards = [(recording, reward) for recording in found if chosen.admits(reward := reward_of(recording))]
    last = page[-1] if page else seen.last
    return replace(seen, fitting=[*seen.fitting, *rewards], count=seen.count + len(page), last=last)


_REWARDS = SpanQuery(kind="reward", limit=8)
"""The rewards of a rollout whose parts and feedback are read."""


async def _rewards(store: Store, found: Sequence[Recording]) -> dict[str, list[Reward]]:
    query = RolloutQuery(ids=tuple(one.rollout.rollout_id for one in found), limit=max(1, len(found)))
    page = await store.recordings(query, spans=_REWARDS) if found else []
    return {one.rollout.rollout_id: [span.reward for span in one.spans if span.reward] for one in page}


def _parts(rewards: Sequence[Reward]) -> dict[str, float | None]:
    """Return the parts of the last reward that has some; a part of a part, such as ``form.pattern``, is left out."""
    none: dict[str, float | None] = {}
    parts = next((each.dimensions for each in reversed(rewards) if each.dimensions), none)
    return {name: value for name, value in parts.items() if name.rpartition(".")[0] not in parts}


def _has_part(spans: Sequence[Span], wanted: str) -> bool:
    name, _, value = (each.strip() for each in wanted.partition("="))
    found = _parts([span.reward for span in spans if span.reward]).get(name)
    return found is not None and f"{found:g}" == value


def _has_note(notes: Sequence[str], wanted: str) -> bool:
    """Return true if a note contains the wanted text; a tag must be there as a whole word."""
    if TAG.fullmatch(wanted):
        return any(wanted.casefold() in TAG.findall(note.casefold()) for note in notes)
    return any(wanted.casefold() in note.casefold() for note in notes)


async def _agents(store: Store, experiment: str) -> dict[str, int]:
    """Return the agents that the steps of an experiment's newest run counted, with the number of their rollouts."""
    records = await store.experiments(experiment) if experiment else []
    every = [agent for record in records for step in await read_tallies(store, record) for agent in step.agents]
    counts: Counter[str] = Counter()
    for each in every:
        counts[each.agent] += each.rollouts
    return {agent: count for agent, count in counts.most_common(MOST_AGENTS) if agent}


def _holds(span: Span, said: str) -> bool:
    # Most spans do not hold the words anywhere, also not in a key, and one search in JSON is fast.
    is_near = to_json(said).decode()[1:-1].casefold() in to_json(_said(span)).decode().casefold()
    return is_near and any(said.casefold() in text.casefold() for text in _texts(_said(span)))


def _said(span: Span) -> list[Any]:
    """Return what was said in a span: a call's request and response, a tool's call and result, feedback, an error."""
    call, reward = span.call, span.reward
    asked = {name: value for name, value in call.request.items() if name != "tools"} if call else span.attributes
    return [asked, call and call.response, reward and reward.feedback, span.status_message]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in cast("Mapping[str, Any]", value).items():
            if name not in _NOT_SAID:
                yield from _texts(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _texts(each)


def _query(chosen: RolloutsFilter) -> RolloutQuery:
    return RolloutQuery(
        experiment=chosen.experiment or None,
        status=(chosen.status,) if chosen.status else (),
        mode=chosen.mode or None,
        group_id=chosen.group or None,
        contains=chosen.text,
        sort="created_at",
        after=chosen.after,
        after_value=chosen.at if chosen.after else "",
        limit=_CHUNK,
        is_newest_first=True,
    )


def _is_of_step(recording: Recording, chosen: RolloutsFilter) -> bool:
    metadata = recording.rollout.metadata
    is_of_algorithm = chosen.algorithm in ("", metadata.get("algorithm"))
    return is_of_algorithm and (chosen.steps is None or metadata.get("step") in chosen.steps)


async def _with_spans(
    store: Store, found: Sequence[Recording], wanted: SpanQuery, fits: Callable[[Sequence[Span]], bool]
) -> list[Recording]:
    """Return the rollouts whose wanted spans fit."""
    query = RolloutQuery(ids=tuple(recording.rollout.rollout_id for recording in found), limit=max(1, len(found)))
    fitting: set[str] = set()
    while found and (page := await store.recordings(query, spans=wanted)):
        fitting |= {recording.rollout.rollout_id for recording in page if fits(recording.spans)}
        query = query.next(page[-1].rollout)
    return [recording for recording in found if recording.rollout.rollout_id in fitting]


def _taught_nothing(spans: Sequence[Span]) -> bool:
    records = training_of(spans)
    return bool(records) and all(record.is_silent for record in records)


def _filters(chosen: RolloutsFilter) -> dict[str, str]:
    """Return the filters that are set as query parameters, without the page's position."""
    values = {name: value for name, value in asdict(chosen).items() if name not in ("after", "at")}
    return {name: str(value) for name, value in values.items() if value not in ("", None)}


_PICKED = {
    "said": "with “{}” in its messages",
    "status": "{}",
    "experiment": "run {}",
    "agent": "agent {}",
    "note": "with “{}” in a note",
    "low": "reward from {}",
    "high": "reward below {}",
    "reward": "without a reward",
    "part": "reward part {}",
    "taught": "taught {}",
    "algorithm": "{}",
    "step": "step {}",
    "until": "to step {}",
    "mode": "mode {}",
    "group": "task {}",
    "text": "with “{}” in its id or task",
    "reject": "a call left out of training: {}",
}
"""Phrases for filters, in the order in which they are shown."""

_PICKED_VALUES = {
    ("status", "failed"): "crashed or timed out",
    ("reject", "cut_off"): "with a call cut off at the token limit",
}
"""Phrases for filters with these values."""


def _picked(filters: Mapping[str, str]) -> list[Picked]:
    return [
        Picked(
            words=_PICKED_VALUES.get((name, filters[name]))
            or words.format(filters[name].replace("_", " ") if name == "reject" else filters[name]),
            without={other: value for other, value in filters.items() if other != name},
        )
        for name, words in _PICKED.items()
        if name in filters
    ]


def _around(span: Span, said: str) -> str:
    """Return the text in which a span holds some words, cut around them."""
    found = ((text, text.casefold().find(said.casefold())) for text in _texts(_said(span)))
    text, at = next(((text, at) for text, at in found if at >= 0), ("", 0))
    start, end = max(0, at - _AROUND), at + len(said) + _AROUND
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _row(
    recording: Recording,
    reward: float | None,
    said: str,
    notes: list[str],
    rewards: Sequence[Reward],
) -> RolloutRow:
    rollout = recording.rollout
    step, algorithm = rollout.metadata.get("step"), rollout.metadata.get("algorithm")
    error = recording.attempts[-1].error if recording.attempts else None
    task = to_json(rollout.task).decode()
    return RolloutRow(
        rollout_id=rollout.rollout_id,
        experiment=rollout.experiment,
        mode=rollout.mode,
        status=rollout.status,
        algorithm=algorithm if isinstance(algorithm, str) else "",
        step=step if isinstance(step, int) else None,
        group_id=rollout.group_id,
        reward=reward,
        attempts=rollout.attempts,
        created_at=rollout.created_at,
        seconds=max(0.0, rollout.finished_at - rollout.started_at) if rollout.finished_at else None,
        task=task if len(task) <= _TASK else f"{task[:_TASK]}…",
        error=f"{error.type}: {error.message}"[:_TASK] if error else "",
        found=_around(recording.spans[0], said) if said else "",
        found_at=recording.spans[0].sequence if said else 0,
        notes=notes,
        parts=_parts(rewards),
        feedback=short(next((each.feedback for each in reversed(rewards) if each.feedback), ""), _TASK),
    )


def _summary(found: Sequence[tuple[Recording, float | None]]) -> Summary:
    by_task: dict[str, list[float]] = {}
    for recording, reward in found:
        if reward is not None and math.isfinite(reward):
            by_task.setdefault(recording.rollout.group_id or recording.rollout.rollout_id, []).append(reward)
    means = [fmean(rewards) for rewards in by_task.values()]
    low, high = interval(means) if len(means) > 1 else (None, None)
    return Summary(
        rollouts=len(found),
        tasks=len(means),
        mean=fmean(means) if means else None,
        low=low,
        high=high,
    )


def _histogram(rewards: Sequence[float | None], filters: dict[str, str]) -> list[Bin]:
    """Return a bar per reward, or bars of equal width for many rewards, and a bar for rollouts without a reward.

    The last bar's query has no upper end of its own.
    """
    kept = {name: value for name, value in filters.items() if name not in ("low", "reward")}
    values = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    edges = _edges(values)
    counts = Counter(max((at for at, edge in enumerate(edges) if edge <= value), default=0) for value in values)
    is_exact = len(edges) == len(set(values))
    bars: list[Bin] = []
    for at, (start, end) in enumerate(zip(edges, [*edges[1:], None], strict=False)):
        high = start if is_exact else max(values) if end is None else end
        query = {**kept, "low": repr(start), **({} if end is None else {"high": repr(end)})}
        bars.append(Bin(low=start, high=high, count=counts[at], query=query))
    if missing := rewards.count(None):
        bars.append(Bin(low=None, high=None, count=missing, query={**kept, "reward": "none"}))
    return bars


def _edges(values: Sequence[float]) -> list[float]:
    """Return the lower ends of the bars for some finite rewards."""
    distinct = sorted(set(values))
    if len(distinct) <= _FEW:
        return distinct
    low, high = distinct[0], distinct[-1]
    return [low * (1 - index / _BINS) + high * (index / _BINS) for index in range(_BINS)]
