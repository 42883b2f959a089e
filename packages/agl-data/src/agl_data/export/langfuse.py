"""Exports rollouts as events for Langfuse's ``POST /api/public/ingestion``: one batch of at most 3 MB per line.

A rollout becomes a trace, and its model calls become generations. Spans of agents, tools and others become other
observations, and rewards become scores. Fields that Langfuse has no name for are in ``metadata`` as ``agl``.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from agl import semconv
from agl.schemas import Json, ModelCall, Span, to_builtins, to_json, unpack_floats
from agl_data.export.about import NO_TARGET, rollout_about, target_of
from agl_data.export.rows import why_left_out
from agl_data.json_values import NO_NUMBERS, LineFile, are_numbers, storable, without_empty
from agl_inspect.exports import Exported, ExportSetup, Losses, call_record

MAX_BYTES = 3 << 20
"""Largest size of a batch's events in bytes; a single larger event becomes a separate batch."""

_OTHERS = "spans and rewards of attempts that did not decide: left out"
_EVENTS = "events of spans: left out"
_WORDLESS = "rewards without a value and without words: left out"
_LEFT_OUT = frozenset({"not_final", "late", "not_selected"})
_KINDS = {semconv.OP_INVOKE_AGENT: "agent", semconv.OP_EXECUTE_TOOL: "tool"}
_LEVELS = {"error": "ERROR"}


class LangfuseWriter:
    """Writes rollouts as batches of events."""

    reads_blobs = False

    def __init__(self, *, setup: ExportSetup) -> None:
        self._losses, self._lines = setup.losses, LineFile(setup)

    def write(self, item: Exported) -> int:
        """Write a rollout as one or more batches; returns 1."""
        batch: list[dict[str, Any]] = []
        size, rollout_id = 0, item.recording.rollout.rollout_id
        for event in _Events(item, self._losses).made():
            own = len(to_json(storable(event)))
            if batch and size + own > MAX_BYTES:
                self._lines.write({"batch": batch}, rollout_id)
                batch, size = [], 0
            batch.append(event)
            size += own
        self._lines.write({"batch": batch}, rollout_id)
        return 1

    def close(self) -> None:
        """Do nothing: every rollout is already written."""


class _Events:
    """Makes the events of a rollout."""

    def __init__(self, item: Exported, losses: Losses) -> None:
        self._item, self._losses = item, losses
        self._rollout = item.recording.rollout
        attempt = item.episode.attempt
        own = [span for span in item.recording.spans if attempt and span.attempt_id == attempt.attempt_id]
        self._lose(_OTHERS, len(item.recording.spans) - len(own))
        seen = {call.span_id: call for call in item.episode.transitions if attempt and call.reject != "not_final"}
        self._left_out = {span_id for span_id, call in seen.items() if call.reject in _LEFT_OUT}
        for call in seen.values():
            self._lose(why_left_out(call.reject), int(call.reject in _LEFT_OUT))
        self._root = next((s for s in own if s.name == semconv.ROOT_SPAN_NAME and s.parent_id is None), None)
        self._spans = {span.span_id: span for span in own if span is not self._root}

    def made(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the rollout: the trace, then observations and scores in the order of the spans."""
        rollout = self._rollout
        about = rollout_about(self._item)
        at_ns = int(min(rollout.started_at or rollout.created_at, 9e9) * 1e9)
        body: dict[str, Json] = {
            "id": rollout.rollout_id,
            "timestamp": _iso(at_ns),
            "name": rollout.experiment or "rollout",
            "input": about.pop("task", None),
            "output": self._root.attributes.get(semconv.OUTPUT) if self._root else None,
            "tags": [rollout.mode, rollout.status],
            "metadata": {"agl": about},
        }
        yield _event("trace-create", rollout.rollout_id, at_ns, body)
        for span in self._spans.values():
            if span.reward is not None:
                yield from self._score(span)
            elif span.span_id not in self._left_out:
                yield self._observation(span)

    def _observation(self, span: Span) -> dict[str, Any]:
        attributes = {name: value for name, value in span.attributes.items() if name != semconv.FRAMEWORK_SPAN_ID}
        self._lose(_EVENTS, len(span.events))
        kind = "generation" if span.call else _KINDS.get(str(attributes.get(semconv.OPERATION)), "span")
        names = (attributes.get(semconv.AGENT_NAME), attributes.get(semconv.TOOL_NAME))
        about = {
            "name": span.name,
            "kind": span.kind,
            "status": span.status,
            "sequence": span.sequence,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "attributes": attributes,
        }
        body = {
            "id": span.span_id,
            "traceId": self._rollout.rollout_id,
            "parentObservationId": self._parent(span),
            "name": next((str(name) for name in names if name and kind in ("agent", "tool")), span.name),
            "startTime": _iso(span.start_ns),
            "endTime": _iso(max(span.start_ns, span.end_ns)),
            "level": _LEVELS.get(span.status, "DEFAULT"),
            "statusMessage": span.status_message,
            **(self._call(span.call) if span.call else _payload(attributes)),
            "metadata": {"agl": {**without_empty(about), **({"call": call_record(span.call)} if span.call else {})}},
        }
        return _event(f"{kind}-create", f"{self._rollout.rollout_id} {span.span_id}", span.start_ns, body)

    def _call(self, call: ModelCall) -> dict[str, Any]:
        if not are_numbers(unpack_floats(call.logprobs)):
            self._lose(NO_NUMBERS)
        sampling: Mapping[str, Json] = to_builtins(call.sampling)
        counts = {"input": call.prompt_len, "output": call.response_len} if call.prompt_ids else {}
        return {
            "model": call.model,
            "modelParameters": sampling,
            "input": call.request,
            "output": call.response,
            "usageDetails": counts,
        }

    def _score(self, span: Span) -> Iterator[dict[str, Any]]:
        reward = span.reward
        assert reward is not None  # noqa: S101  # the caller looked
        value: Json = reward.feedback if reward.value is None else reward.value
        if value == "":
            self._lose(_WORDLESS)
            return
        target = target_of(span, reward)
        if target and (target not in self._spans or target in self._left_out):
            self._lose(NO_TARGET)
            return
        about = {"reward": to_builtins(reward), "at_ns": span.start_ns, "sequence": span.sequence}
        body: dict[str, Json] = {
            "id": span.span_id,
            "traceId": self._rollout.rollout_id,
            "observationId": target,
            "name": reward.name or "reward",
            "value": value,
            "dataType": "CATEGORICAL" if reward.value is None else "NUMERIC",
            "comment": reward.feedback if reward.value is not None else None,
            "metadata": {"agl": {**about, **({"is_late": True} if span.is_late else {})}},
        }
        yield _event("score-create", f"{self._rollout.rollout_id} {span.span_id}", span.start_ns, body)

    def _parent(self, span: Span) -> str | None:
        """Return the parent id to write: the framework's span if the call names one, else the recorded parent.

        Ids of spans that are not written do not count; ``None`` if no id is left.
        """
        for parent in (span.attributes.get(semconv.FRAMEWORK_SPAN_ID), span.parent_id):
            if parent != span.span_id and parent in self._spans and parent not in self._left_out:
                return str(parent)
        return None

    def _lose(self, what: str, count: int = 1) -> None:
        self._losses.add(what, self._rollout.rollout_id, count)


def _payload(attributes: Mapping[str, Any]) -> dict[str, Json]:
    given = {"input": attributes.get(semconv.TOOL_ARGUMENTS), "output": attributes.get(semconv.TOOL_RESULT)}
    return {name: value for name, value in given.items() if value is not None}


def _event(kind: str, key: str, at_ns: int, body: dict[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in body.items() if value not in (None, "", {}, [])}
    return {"id": f"{kind} {key}", "type": kind, "timestamp": _iso(at_ns), "body": known}


def _iso(unix_ns: int) -> str:
    seconds, rest = divmod(max(unix_ns, 0), 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"
