"""The view of a group: the rollouts of one task side by side from the call in which they first differ."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, cast

from msgspec.structs import replace

from agl import semconv
from agl.contracts import CallUse, Recording, RolloutQuery, Store
from agl.dialects import call_messages
from agl.episodes import Enclosing, build_episode, chronological, episode_reward
from agl.errors import ConfigError, NotFoundError
from agl.schemas import ModelCall, Record, Rollout, Span, identity_ids
from agl_console.reading import newest_recordings
from agl_console.siblings import standing
from agl_inspect.rollouts.conversations import parts_of
from agl_inspect.rollouts.training import uses_of
from agl_inspect.rollouts.tree import Contents, Text
from agl_inspect.rollouts.turns import tone_of

LOOKED = 200
"""Number of the task's newest rollouts that are searched for those of a step."""

COMPARED = 16
"""The most rollouts that are shown side by side."""

CALLS = 30
"""The most calls of each rollout that are shown."""

CUT = 400
"""The most characters of an answer that are shown."""

_BEFORE = 120
"""The most characters that are shown before the position where two answers diverge."""


class GroupFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page.

    Attributes:
        experiment: The run.
        group: The group's id, which is the task's identity.
        algorithm: The algorithm that requested the rollouts; by default that of the newest rollout.
        step: The step of that algorithm.
        against: The rollout with which the others are compared; by default the first.
    """

    experiment: str = ""
    group: str = ""
    algorithm: str = ""
    step: int | None = None
    against: str = ""


class Difference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The first difference between a rollout and the one it is compared with.

    ``call`` is the number of the call, from 0; ``words`` describes the difference.
    """

    call: int
    words: str


class CallCell(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A call of a rollout.

    ``same`` is the start that its answer shares with the compared call's answer; ``other`` is the rest of its answer.
    ``tone`` is the advantage on the scale of the group, from -3 to 3.
    """

    sequence: int
    agent: str
    same: str
    other: str
    tokens: int
    credit: float | None
    advantage: float | None
    tone: int | None
    note: str


class Member(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rollout of the group.

    Attributes:
        credit: Mean credit of the rollout's calls, as the last step reported it.
        advantage: Mean advantage of the rollout's trained calls, as the last step reported it.
        why: How the reward stands in the group, and what training did with the rollout's answers.
        difference: The first difference; ``None`` for equal rollouts and for those that cannot be compared.
        is_readable: Whether all of its spans can be read, so that its calls can be compared.
        calls: The first calls of the rollout.
        total: The number of all calls of the rollout.
    """

    rollout_id: str
    status: str
    reward: float | None
    credit: float | None
    advantage: float | None
    why: str
    difference: Difference | None
    is_readable: bool
    calls: list[CallCell]
    total: int


class GroupView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rollouts of a task in one step.

    Attributes:
        against: The rollout with which the others are compared.
        task: The task of the rollouts.
        first: The first call in which any rollout differs, from 0; ``None`` if all are equal.
        shared: The number of first calls that are the same in all rollouts.
        steps: The algorithms and steps in which the newest rollouts of the task ran.
        left_out: The number of rollouts of the step that are not shown.
    """

    experiment: str
    group: str
    algorithm: str
    step: int | None
    task: Text
    against: str
    first: int | None
    shared: int
    members: list[Member]
    steps: list["Ran"]
    left_out: int


class Ran(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A step in which the task was run; ``step`` is ``None`` for rollouts without a step."""

    algorithm: str
    step: int | None
    rollouts: int


async def group_view(store: Store, chosen: GroupFilter) -> GroupView:
    """Read the rollouts of a task side by side.

    Raises:
        ConfigError: The address names no group.
        NotFoundError: The task's newest rollouts do not belong to the given step or include ``against``, or there are
            none.
    """
    if not chosen.group:
        raise ConfigError("the address names no group; the page of a rollout links to its group")
    query = RolloutQuery(
        experiment=chosen.experiment, group_id=chosen.group, sort="created_at", is_newest_first=True, limit=LOOKED
    )
    every = await store.rollouts(query)
    ran: dict[tuple[str, int | None], list[Rollout]] = {}
    for rollout in every:
        ran.setdefault(_step_of(rollout), []).append(rollout)
    wanted = (chosen.algorithm, chosen.step) if chosen.step is not None or chosen.algorithm else next(iter(ran), None)
    if wanted is None or wanted not in ran:
        where = "" if wanted is None else f" in {wanted[0]} step {wanted[1]}"
        raise NotFoundError(
            "group", chosen.group + where, f"rollouts of it in the run {chosen.experiment!r}: {len(every)}"
        )
    ids = sorted(rollout.rollout_id for rollout in ran[wanted])
    against = chosen.against or ids[0]
    if against not in ids:
        raise NotFoundError("rollout", against, f"the group has: {', '.join(ids[:COMPARED])}")
    shown = list(dict.fromkeys([against, *ids]))[:COMPARED]
    recordings = [
        one
        for part in (shown[:1], shown[1:])  # large ones leave others out, but never that with which they are compared
        if part
        async for one in newest_recordings(store, RolloutQuery(ids=tuple(part)), len(part))
    ]
    members = _members([_Run(recording) for recording in recordings], against)
    first = min((member.difference.call for member in members if member.difference), default=None)
    is_readable = all(member.is_readable for member in members)
    equal = max((len(member.calls) for member in members), default=0) if len(members) > 1 and is_readable else 0
    return GroupView(
        experiment=chosen.experiment,
        group=chosen.group,
        algorithm=wanted[0],
        step=wanted[1],
        task=Contents().text("task", recordings[0].rollout.task if recordings else None),
        against=against,
        first=first,
        shared=first if first is not None and is_readable else equal,
        members=members,
        steps=[Ran(algorithm=key[0], step=key[1], rollouts=len(found)) for key, found in ran.items()],
        left_out=len(ids) - len(members),
    )


class _Call:
    """The parts of a call that are compared: agent, prompt and answer."""

    def __init__(self, span: Span, call: ModelCall, agent: str) -> None:
        messages, asked = call_messages(call), call_messages(replace(call, response=None))
        said = messages[_common(asked, messages) :]
        self.span = span
        self.call = call
        self.agent = agent
        self.prompt = [_without_ids(message) for message in asked]
        self.answer = "\n".join(map(_answer, said))


def _answer(message: Mapping[str, Any]) -> str:
    thinking, content, tools = parts_of(message)
    return "\n".join(filter(None, (thinking, content, *(f"{name} {arguments}" for _, name, arguments in tools))))


def _without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the ids of tool calls, which differ whenever they are generated anew."""
    plain = {name: value for name, value in message.items() if name != "tool_call_id"}
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [
            {name: value for name, value in cast("dict[str, Any]", call).items() if name != "id"}
            if isinstance(call, dict)
            else call
            for call in cast("list[Any]", calls)
        ]
    return plain


class _Run:
    """The calls of a rollout's deciding attempt in order, with its reward and the steps' use of each call."""

    def __init__(self, recording: Recording) -> None:
        self.rollout = recording.rollout
        own = [span for span in recording.spans if span.attempt_id == self.rollout.attempt_id]
        enclosing = Enclosing(own)
        spans = chronological(own).spans
        attempt = next((one for one in recording.attempts if one.attempt_id == self.rollout.attempt_id), None)
        made = build_episode(self.rollout, attempt, own).transitions
        # An exchange that the client repeated is not a decision of the agent.
        repeated = {call.span_id for call in made if call.reject == "superseded"}
        self.calls = [
            _Call(span, span.call, enclosing.who(span).agent)
            for span in spans
            if span.call is not None and span.span_id not in repeated
        ]
        self.reward = episode_reward(own)
        self.is_readable = all(span.name != semconv.UNREADABLE for span in own)
        self.uses = uses_of(recording.spans)


def _members(runs: Sequence[_Run], against: str) -> list[Member]:
    """Return the columns of the view, starting with the rollout that the others are compared with."""
    ordered = sorted(runs, key=lambda run: (run.rollout.rollout_id != against, run.rollout.rollout_id))
    rewards = [run.reward for run in ordered if run.reward is not None]
    largest = max((abs(use.advantage or 0.0) for run in ordered for use in run.uses.values()), default=0.0)
    return [_member(run, ordered[0], rewards, largest) for run in ordered]


def _member(run: _Run, other: _Run, rewards: Sequence[float], largest: float) -> Member:
    own = [run.uses[call.span.span_id] for call in run.calls if call.span.span_id in run.uses]
    credits = [use.credit for use in own if use.credit is not None]
    advantages = [use.advantage for use in own if use.advantage is not None]
    advantage = fmean(advantages) if advantages else None
    cells = [
        _cell(call, other.calls[at] if at < len(other.calls) else None, run.uses, largest)
        for at, call in enumerate(run.calls[:CALLS])
    ]
    return Member(
        rollout_id=run.rollout.rollout_id,
        status=run.rollout.status,
        reward=run.reward,
        credit=fmean(credits) if credits else None,
        advantage=advantage,
        why=_why(run, advantage, rewards),
        difference=first_difference(other.calls, run.calls) if run.is_readable and other.is_readable else None,
        is_readable=run.is_readable,
        calls=cells,
        total=len(run.calls),
    )


def _why(run: _Run, advantage: float | None, rewards: Sequence[float]) -> str:
    """Return how a rollout's reward stands in its group, and what training did with its answers."""
    said = [standing(run.reward, rewards, advantage)]
    if run.reward is None:
        said.append("It has no reward.")
    if advantage is None:
        notes = dict.fromkeys(use.note for use in run.uses.values() if use.row < 0 and use.note)
        said.append(f"It did not train: {'; '.join(notes)}." if notes else "No step has trained on it.")
    return " ".join(filter(None, said))


def _cell(call: _Call, other: _Call | None, uses: Mapping[str, CallUse], largest: float) -> CallCell:
    same = _common(call.answer, other.answer) if other else 0
    start = max(0, same - _BEFORE) if len(call.answer) > CUT else 0
    use = uses.get(call.span.span_id)
    return CallCell(
        sequence=call.span.sequence,
        agent=call.agent,
        same=("…" if start else "") + call.answer[start:same],
        other=call.answer[same : start + CUT] + ("…" if len(call.answer) > max(same, start + CUT) else ""),
        tokens=call.call.response_len,
        credit=use.credit if use else None,
        advantage=use.advantage if use else None,
        tone=tone_of(use.advantage, largest) if use and use.advantage is not None else None,
        note=use.note if use and use.row < 0 else "",
    )


def first_difference(first: Sequence[_Call], second: Sequence[_Call]) -> Difference | None:
    """Return the first difference between the calls of two rollouts; ``None`` if they are equal."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if words := _difference(one, other):
            return Difference(call=at, words=f"call {at + 1}, {words}")
    if len(first) == len(second):
        return None
    at = min(len(first), len(second))
    one = "this one" if len(second) > len(first) else "the first one"
    return Difference(call=at, words=f"call {at + 1}, which only {one} makes")


def _difference(one: _Call, other: _Call) -> str:
    """Describe how two calls differ; ``""`` if they are equal."""
    if one.agent != other.agent:
        return f"made by {other.agent or 'no agent'} and not by {one.agent or 'no agent'}"
    prompts = [identity_ids(each.call.prompt_ids, each.call.media) for each in (one, other)]
    token = _token(*prompts)
    message = _common(one.prompt, other.prompt)
    if message < max(len(one.prompt), len(other.prompt)):
        return _place("prompt", f"message {message + 1}", token)
    if token is not None:
        return _place("prompt", "", token)
    token = _token(one.call.response_ids, other.call.response_ids)
    return _place("answer", "", token) if token is not None or one.answer != other.answer else ""


def _place(part: str, message: str, token: int | None) -> str:
    return ", ".join(filter(None, (part, message, "" if token is None else f"token {token + 1}")))


def _token(one: bytes, other: bytes) -> int | None:
    """Return the index of the first token that differs; ``None`` if none differs, or one side has no ids."""
    return None if one == other or not one or not other else _common(one, other) // 4


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix, found by bisection, because texts may have a million characters."""
    same, differs = 0, min(len(one), len(other)) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def _step_of(rollout: Rollout) -> tuple[str, int | None]:
    algorithm, step = rollout.metadata.get("algorithm"), rollout.metadata.get("step")
    return algorithm if isinstance(algorithm, str) else "", step if isinstance(step, int) else None
