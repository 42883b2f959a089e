"""Makes runs from the spans of traces, which may be anywhere in a file: one trace is one run.

A reader converts each record of its format to a :class:`Part`. The parts are collected in a temporary database, so that
memory holds one trace at a time. Where model calls are nested, only the innermost counts as a call, because framework
and client report the same call.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from agl import semconv
from agl.schemas import ErrorInfo, Json, ModelCall, Reward, RewardSource, SpanEvent, SpanStatus
from agl_data.importing.runs import CHANGED_TEXT, Run, agent_attributes, tool_attributes
from agl_data.importing.source import Line
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, json_text
from agl_data.json_values import storable

__all__ = [
    "KINDS",
    "Kind",
    "Part",
    "Scored",
    "agent_attributes",
    "judged",
    "marked",
    "runs_of",
    "tool_attributes",
]

_NO_CALLS = "traces without a model call: left out"
_NO_MESSAGES = "model calls without messages: the exporter left contents out"

Kind = Literal["internal", "server", "client", "producer", "consumer"]
KINDS: tuple[Kind, ...] = ("internal", "server", "client", "producer", "consumer")


class Scored(msgspec.Struct, frozen=True):
    """A reward of a trace.

    Attributes:
        key: The reward's id in the trace.
        reward: The reward; its scope is set from ``about``, unless ``is_exact``.
        about: The id or the alias of the span that the reward is about; ``""`` for the run.
        at_ns: Time of the reward in Unix nanoseconds.
        is_late: True if the reward came after the attempt had been decided.
        is_exact: True if agl exported the reward, so that its scope is already right.
        is_mean: True for a mean, which counts only if the trace has no other reward with this name and target.
    """

    key: str
    reward: Reward
    about: str = ""
    at_ns: int = 0
    is_late: bool = False
    is_exact: bool = False
    is_mean: bool = False


class Part(msgspec.Struct, kw_only=True):
    """A span of a trace, or other data about the trace, such as rewards.

    Attributes:
        id: The span's id in its trace; ``""`` if the part is not a span.
        parent: The id of the parent span; ``""`` for a top span.
        alias: Another id by which a reward may refer to the span.
        name: The span's name.
        kind: The span's kind in OpenTelemetry.
        start_ns: Start in Unix nanoseconds; 0 if unknown.
        end_ns: End in Unix nanoseconds; 0 if unknown.
        status: The span's status.
        message: The text of the error.
        attributes: The span's attributes, with names of the GenAI conventions where they have one.
        events: Events within the span.
        call: The model call that the span reports; ``None`` if it is not a call.
        is_left_out: True if the span is not imported, because the run's root span or a reward takes its place.
        stands_for: The name under which a top span becomes an agent if no span of the trace is an agent.
        rewards: Rewards in the record.
        fields: Fields, besides the attributes, that ``--task-from`` and ``--reward`` can name.
        lost: Descriptions of the items that could not be imported.
    """

    id: str = ""
    parent: str = ""
    alias: str = ""
    name: str = ""
    kind: Kind = "internal"
    start_ns: int = 0
    end_ns: int = 0
    status: SpanStatus = "unset"
    message: str = ""
    attributes: dict[str, Json] = {}
    events: list[SpanEvent] = []
    call: ModelCall | None = None
    is_left_out: bool = False
    stands_for: str = ""
    rewards: list[Scored] = []
    fields: dict[str, Json] = {}
    lost: list[str] = []


def marked(line: Line, parts: Iterable[tuple[str, Part]]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a record; if values of the record were replaced, add that loss to the first part."""
    for trace, part in parts:
        part.lost = [*part.lost, CHANGED_TEXT] if line.is_changed else part.lost
        yield trace, part
        line = line._replace(is_changed=False)


def judged(value: float | None, words: Json, comment: str, *, name: str, source: RewardSource | None) -> Reward:
    """Return a judgement as a reward; if it has no value, the feedback is ``words`` followed by ``comment``."""
    said = "" if value is not None or words is None else json_text(words)
    return Reward(
        value=value, name=name, source=source or "evaluator", feedback=": ".join(filter(None, (said, comment)))
    )


def runs_of(path: Path, parts: Iterable[tuple[str, Part]], *, content: Sequence[str] = ()) -> Iterator[Run]:
    """Group the parts of a file by trace, and yield one run per trace, ordered by start time.

    Args:
        path: The file, for messages.
        parts: Pairs of a trace id and a part, in any order; the id is ``""`` for a part that belongs to no trace.
        content: Prefixes of attributes that are dropped because the fields of the call have their contents.
    """
    decode = msgspec.msgpack.Decoder(Part).decode
    with closing(sqlite3.connect("")) as gathered:  # a temporary file, which SQLite deletes when the connection closes
        gathered.execute("CREATE TABLE parts (trace TEXT, start INTEGER, number INTEGER, data BLOB)")
        rows = ((trace, part.start_ns, number, _packed(part)) for number, (trace, part) in enumerate(parts))
        gathered.executemany("INSERT INTO parts VALUES (?, ?, ?, ?)", rows)
        gathered.execute("CREATE INDEX by_trace ON parts (trace, start, number)")
        traces = gathered.execute("SELECT trace, min(nullif(start, 0)) FROM parts GROUP BY trace ORDER BY 2, 1")
        for trace, _ in traces:
            found = gathered.execute("SELECT data FROM parts WHERE trace = ? ORDER BY start, number", (trace,))
            yield _run(path, trace, [decode(data) for (data,) in found], tuple(content))


def _packed(part: Part) -> bytes:
    """Encode a part as msgpack; values that a store cannot hold are replaced, which counts as a loss."""
    try:
        return msgspec.msgpack.encode(part)
    except (UnicodeEncodeError, OverflowError):
        part.lost = list(dict.fromkeys([*part.lost, CHANGED_TEXT]))
        return msgspec.msgpack.encode(storable(msgspec.to_builtins(part, builtin_types=(bytes,))))


def _run(path: Path, trace: str, parts: list[Part], content: tuple[str, ...]) -> Run:
    # Each span once, in its last copy: an exporter sends a span again if it got no response.
    parts = list({part.id or number: part for number, part in enumerate(parts)}.values())
    spans = [part for part in parts if part.id]
    tops = [span for span in spans if not span.parent] or spans[:1]
    fields: dict[str, Json] = {}
    for part in sorted(parts, key=lambda part: (bool(part.id and part.parent), not part.fields)):
        fields = {**part.fields, **part.attributes, **fields}
    run = Run(trace, place=f"{path}, trace {trace}", fields=fields, grows=True)
    calls = _innermost(spans)
    if not any(semconv.AGENT_NAME in span.attributes for span in spans):
        for span in tops:
            span.attributes = {**span.attributes, **(agent_attributes(span.stands_for) if span.stands_for else {})}
    for span in spans:
        if span.id in calls:
            _add_call(run, span, content)
        elif not span.is_left_out:
            _add_other(run, span, content)
    for part in parts:
        run.lost.update(part.lost)
    _add_rewards(run, parts, calls)
    if tops and tops[0].status == "error":
        kind = as_text(tops[0].attributes.get(semconv.ERROR_TYPE)) or "error"
        run.error = ErrorInfo(type=kind, message=tops[0].message)
    run.lost[_NO_CALLS] += int(bool(trace) and not run.calls)
    return run


def _add_rewards(run: Run, parts: list[Part], calls: set[str]) -> None:
    known = {name: part.id for part in parts if part.id for name in (part.id, part.alias) if name}
    every = [scored for part in parts for scored in part.rewards]
    reported = {(scored.about, scored.reward.name) for scored in every if not scored.is_mean}
    for scored in every:
        if not scored.is_mean or (scored.about, scored.reward.name) not in reported:
            _add_reward(run, scored, about=known.get(scored.about, ""), calls=calls)


def _add_reward(run: Run, scored: Scored, *, about: str, calls: set[str]) -> None:
    reward = scored.reward
    if not scored.is_exact:
        about = about if about in calls else ""
        reward = msgspec.structs.replace(reward, scope="turn" if about else "rollout")
    run.add_reward(scored.key, reward, about=about, at_ns=scored.at_ns, is_late=scored.is_late)


def _innermost(spans: list[Part]) -> set[str]:
    """Return the ids of the model calls that have no model call below them."""
    found = {span.id for span in spans if span.call is not None}
    parents = {span.id: span.parent for span in spans}
    outer: set[str] = set()
    for own in found:
        above, seen = parents.get(own, ""), {own}
        while above and above not in seen:
            seen.add(above)
            outer.add(above)
            above = parents.get(above, "")
    return found - outer


def _add_call(run: Run, span: Part, content: tuple[str, ...]) -> None:
    call = cast("ModelCall", span.call)
    messages = _asked(call)
    run.lost[_NO_MESSAGES] += int(not messages and not call.error)
    if run.prompt is None:
        run.prompt = next((each.get("content") for each in messages if each.get("role") == "user"), None)
    about = _kept(span.attributes, content)
    run.add_call(span.id, call, parent=span.parent, start_ns=span.start_ns, end_ns=span.end_ns, about=about)


def _asked(call: ModelCall) -> list[dict[str, Any]]:
    """Return the messages of a call's request, in chat's form or as items of the Responses API."""
    request = as_dict(call.request)
    given = request.get("input") if call.dialect == "responses" else request.get("messages")
    return [{"role": "user", "content": given}] if isinstance(given, str) else dicts_in(as_list(given))


def _add_other(run: Run, span: Part, content: tuple[str, ...]) -> None:
    run.add(
        span.id,
        span.name,
        parent=span.parent,
        kind=span.kind,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=span.status,
        message=span.message,
        attributes=_kept(span.attributes, content) if span.call else span.attributes,
        events=tuple(span.events),
    )


def _kept(attributes: dict[str, Json], content: tuple[str, ...]) -> dict[str, Json]:
    return {name: value for name, value in attributes.items() if not name.startswith(content)}
