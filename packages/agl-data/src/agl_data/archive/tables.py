"""Converts rollouts, attempts and spans to the rows of a part, with columns to query and the exact record, and back.

The column ``record`` holds the record in msgpack, without the fields named in ``moved``, whose values are exactly those
in the columns of the same names.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from agl import semconv
from agl.contracts import Recording
from agl.episodes import Enclosing, episode_reward
from agl.schemas import Attempt, ModelCall, Rollout, Span, decode, encode, from_json
from agl_data.archive.arrow import Kind, Row, integer, json_text, micros_of_ns, row_of

ROLLOUTS: dict[str, Kind] = {
    "rollout_id": "text",
    "experiment": "text",
    "mode": "text",
    "status": "text",
    "reward": "float",
    "algorithm": "text",
    "step": "int",
    "group_id": "text",
    "agents": "texts",
    "models": "texts",
    "calls": "int",
    "prompt_tokens": "int",
    "response_tokens": "int",
    "attempts": "int",
    "created_at": "time",
    "started_at": "time",
    "finished_at": "time",
    "task": "text",
    "metadata": "text",
    "moved": "texts",
    "record": "bytes",
}
ATTEMPTS: dict[str, Kind] = {
    "rollout_id": "text",
    "attempt_id": "text",
    "experiment": "text",
    "number": "int",
    "status": "text",
    "worker": "text",
    "started_at": "time",
    "finished_at": "time",
    "error_type": "text",
    "error": "text",
    "record": "bytes",
}
SPANS: dict[str, Kind] = {
    "rollout_id": "text",
    "attempt_id": "text",
    "experiment": "text",
    "sequence": "int",
    "span_id": "text",
    "parent_id": "text",
    "name": "text",
    "operation": "text",
    "agent": "text",
    "status": "text",
    "started_at": "time",
    "ended_at": "time",
    "duration_s": "float",
    "model": "text",
    "model_version": "text",
    "policy": "text",
    "finish_reason": "text",
    "prompt_ids": "ids",
    "response_ids": "ids",
    "logprobs": "floats",
    "request": "text",
    "response": "text",
    "reward": "float",
    "reward_name": "text",
    "reward_source": "text",
    "attributes": "text",
    "moved": "texts",
    "record": "bytes",
}
COLUMNS: dict[str, dict[str, Kind]] = {"rollouts": ROLLOUTS, "attempts": ATTEMPTS, "spans": SPANS}
"""The columns of each table; ``task``, ``metadata``, ``request``, ``response`` and ``attributes`` hold JSON text."""

STORED: dict[str, dict[str, Kind]] = {
    table: {name: columns[name] for name in ("rollout_id", "moved", "record", *also) if name in columns}
    for table, columns, also in (
        ("rollouts", ROLLOUTS, ("task", "metadata")),
        ("attempts", ATTEMPTS, ()),
        ("spans", SPANS, ("prompt_ids", "response_ids", "logprobs", "request", "response", "attributes")),
    )
}
"""The columns of each table that the records are rebuilt from."""

_PACKED = ("prompt_ids", "response_ids", "logprobs")
_BODIES = ("request", "response")


class Rows(NamedTuple):
    """The rows of one recording, by table."""

    rollouts: list[Row]
    attempts: list[Row]
    spans: list[Row]


def rows_of(recording: Recording) -> Rows:
    """Return the rows of a rollout and of all its attempts and spans."""
    experiment = recording.rollout.experiment
    enclosing: dict[str, Enclosing] = {}
    for attempt_id in dict.fromkeys(span.attempt_id for span in recording.spans):
        enclosing[attempt_id] = Enclosing([span for span in recording.spans if span.attempt_id == attempt_id])
    spans = [_span_row(span, experiment, enclosing[span.attempt_id].who(span).agent) for span in recording.spans]
    attempts = [_attempt_row(attempt, experiment) for attempt in recording.attempts]
    return Rows([_rollout_row(recording, spans)], attempts, spans)


def rollout_of(row: Row) -> Rollout:
    """Rebuild the rollout from its row."""
    rollout = decode(row["record"], Rollout)
    return replace(rollout, **{name: from_json(row[name], object) for name in row["moved"]})


def attempt_of(row: Row) -> Attempt:
    """Rebuild the attempt from its row."""
    return decode(row["record"], Attempt)


def span_of(row: Row) -> Span:
    """Rebuild the span from its row."""
    span = decode(row["record"], Span)
    moved = {name: row[name] if name in _PACKED else from_json(row[name], object) for name in row["moved"]}
    own = {"attributes": moved.pop("attributes")} if "attributes" in moved else {}
    if span.call is not None and moved:
        own["call"] = replace(span.call, **moved)
    return replace(span, **own) if own else span


def _rollout_row(recording: Recording, spans: list[Row]) -> Row:
    rollout = recording.rollout
    attempt_id = rollout.attempt_id or ""
    deciding = [span for span in recording.spans if span.attempt_id == attempt_id]
    calls = [row for row in spans if row["attempt_id"] == attempt_id and "model" in row]
    moved = [name for name in _EMPTY if json_text(getattr(rollout, name))[1]]
    return {
        **row_of(rollout, ROLLOUTS),
        "task": json_text(rollout.task)[0],
        "reward": episode_reward(deciding),
        "algorithm": _text(rollout.metadata.get("algorithm")),
        "step": integer(rollout.metadata.get("step")),
        "agents": sorted({row["agent"] for row in calls if row["agent"]}),
        "models": sorted({row["model"] for row in calls}),
        "calls": len(calls),
        "prompt_tokens": sum(len(row["prompt_ids"] or b"") // 4 for row in calls),
        "response_tokens": sum(len(row["response_ids"] or b"") // 4 for row in calls),
        "moved": moved,
        "record": encode(replace(rollout, **{name: _EMPTY[name] for name in moved})),
    }


_EMPTY: Mapping[str, Any] = {"task": None, "metadata": {}}


def _attempt_row(attempt: Attempt, experiment: str) -> Row:
    return {
        **row_of(attempt, ATTEMPTS),
        "experiment": experiment,
        "error_type": attempt.error.type if attempt.error else None,
        "error": attempt.error.message if attempt.error else None,
        "record": encode(attempt),
    }


def _span_row(span: Span, experiment: str, agent: str) -> Row:
    attributes, is_exact = json_text(span.attributes)
    start, end = micros_of_ns(span.start_ns), micros_of_ns(span.end_ns)
    row: Row = {
        **row_of(span, SPANS),
        "experiment": experiment,
        "operation": _text(span.attributes.get(semconv.OPERATION)),
        "agent": agent or None,
        "started_at": start,
        "ended_at": end,
        "duration_s": None if start is None or end is None else (span.end_ns - span.start_ns) / 1e9,
        "attributes": attributes,
    }
    left: dict[str, Any] = {}
    moved: list[str] = []
    if is_exact:
        left["attributes"] = {}
        moved.append("attributes")
    if (call := span.call) is not None:
        columns, taken = _call_columns(call)
        row |= columns
        left["call"] = replace(call, **taken)
        moved += taken
    if (reward := span.reward) is not None:
        row |= {"reward": reward.value, "reward_name": reward.name, "reward_source": reward.source}
    return {**row, "moved": moved, "record": encode(replace(span, **left) if left else span)}


def _call_columns(call: ModelCall) -> tuple[Row, dict[str, Any]]:
    """Return the columns of a call, and empty values for those fields of its record that a column holds exactly."""
    packed = {name: getattr(call, name) for name in _PACKED}
    bodies = {name: json_text(getattr(call, name)) for name in _BODIES}
    columns = {
        "model": call.model,
        "model_version": call.model_version,
        "policy": call.policy,
        "finish_reason": call.finish_reason,
        **{name: None if len(data) % 4 else data for name, data in packed.items()},
        **{name: text for name, (text, _) in bodies.items()},
    }
    left: dict[str, Any] = {name: b"" for name, data in packed.items() if data and not len(data) % 4}
    return columns, {**left, **{name: None for name, (_, is_exact) in bodies.items() if is_exact}}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
