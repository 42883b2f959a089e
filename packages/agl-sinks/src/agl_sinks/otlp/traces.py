"""Converts a rollout to a trace: a span for the rollout, spans for its attempts if it has several, and recorded spans.

Ids in the trace are digests of the rollout's id, its time of creation, and the recorded id. Sending a rollout again
therefore gives the same ids, and a rollout with the same id in another store gets different ones. The recorded id of a
span is in the attribute ``agl.span_id``.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from agl import semconv
from agl.contracts import Recording
from agl.episodes import build_episode
from agl.schemas import Attempt, ErrorInfo, Json, Reward, Span, SpanEvent, Transition, to_json
from agl_inspect.exports import call_record
from agl_sinks.otlp.attributes import allowed, allowed_events, as_text, call_attributes, key_values

CALL_RECORD, REWARD_RECORD = "agl.call", "agl.reward_record"
"""Attributes that hold the whole record of a call or a reward, as JSON."""

_KINDS = {
    "internal": OtlpSpan.SPAN_KIND_INTERNAL,
    "server": OtlpSpan.SPAN_KIND_SERVER,
    "client": OtlpSpan.SPAN_KIND_CLIENT,
    "producer": OtlpSpan.SPAN_KIND_PRODUCER,
    "consumer": OtlpSpan.SPAN_KIND_CONSUMER,
}
_STATUSES = {"unset": Status.STATUS_CODE_UNSET, "ok": Status.STATUS_CODE_OK, "error": Status.STATUS_CODE_ERROR}
_OUTCOMES = {"succeeded": "ok", "failed": "error", "timeout": "error", "lost": "error"}


def spans_of(recording: Recording, *, has_contents: bool, has_records: bool = False) -> Iterator[OtlpSpan]:
    """Convert a finished rollout with all its spans; the rollout's own span comes first.

    Args:
        recording: The rollout with its attempts and spans.
        has_contents: Include messages, tasks and other texts.
        has_records: Include all fields of calls and rewards, such as token ids, in attributes with JSON.
    """
    return _Trace(recording, has_contents=has_contents, has_records=has_records).spans()


class _Trace:
    """Converts one rollout to the spans of a trace."""

    def __init__(self, recording: Recording, *, has_contents: bool, has_records: bool) -> None:
        rollout = recording.rollout
        deciding = next((a for a in recording.attempts if a.attempt_id == rollout.attempt_id), None)
        self._recording, self._has_contents, self._has_records = recording, has_contents, has_records
        self._key = f"{rollout.rollout_id}@{rollout.created_at!r}"
        self._deciding = deciding
        self._episode = build_episode(rollout, deciding, recording.spans)
        self._seen = {(call.attempt_id, call.span_id): call for call in self._episode.transitions}
        self._known = {(span.attempt_id, span.span_id) for span in recording.spans}
        self._roots = {
            span.attempt_id: span
            for span in recording.spans
            if span.name == semconv.ROOT_SPAN_NAME and span.parent_id is None and span.attempt_id
        }
        self._common: dict[str, Json] = {
            "agl.experiment": rollout.experiment,
            "agl.rollout_id": rollout.rollout_id,
            "agl.mode": rollout.mode,
            "agl.algorithm": rollout.metadata.get("algorithm"),
            "agl.step": rollout.metadata.get("step"),
        }

    def spans(self) -> Iterator[OtlpSpan]:
        """Yield the span of the rollout, spans of its attempts if it has several, and the recorded spans."""
        yield self._rollout()
        if self._has_several:
            yield from map(self._attempt, self._recording.attempts)
        for span in self._recording.spans:
            if self._roots.get(span.attempt_id) is not span:
                yield self._recorded(span)

    @property
    def _has_several(self) -> bool:
        return len(self._recording.attempts) > 1

    def _rollout(self) -> OtlpSpan:
        rollout, episode = self._recording.rollout, self._episode
        attempt = self._deciding
        alone = {} if self._has_several or attempt is None else self._of_attempt(attempt)
        start = rollout.started_at or rollout.created_at
        span = self._span(
            "rollout",
            name=f"rollout {rollout.experiment}".rstrip(),
            times=(_ns(start), _ns(rollout.finished_at or start)),
            attributes={
                **alone,
                "agl.group_id": rollout.group_id,
                "agl.status": rollout.status,
                "agl.attempts": rollout.attempts,
                "agl.reward": episode.reward,
                **{f"agl.resources.{name}": version for name, version in rollout.resources.items()},
                **({"agl.task": as_text(rollout.visible_task)} if self._has_contents else {}),
            },
        )
        self._end(span, _OUTCOMES.get(rollout.status, "unset"), attempt.error if attempt else None)
        return span

    def _attempt(self, attempt: Attempt) -> OtlpSpan:
        span = self._span(
            f"attempt {attempt.attempt_id}",
            name=f"attempt {attempt.number}",
            times=(_ns(attempt.started_at), _ns(attempt.finished_at or attempt.started_at)),
            attributes=self._of_attempt(attempt),
        )
        span.parent_span_id = self._id("rollout")
        self._end(span, _OUTCOMES.get(attempt.status, "unset"), attempt.error)
        return span

    def _of_attempt(self, attempt: Attempt) -> dict[str, Json]:
        root = self._roots.get(attempt.attempt_id)
        return {
            **(allowed(root.attributes, has_contents=self._has_contents) if root else {}),
            "agl.attempt_id": attempt.attempt_id,
            "agl.attempt": attempt.number,
            "agl.attempt_status": attempt.status,
            "agl.worker": attempt.worker,
            "agl.span_id": root.span_id if root else None,
        }

    def _recorded(self, span: Span) -> OtlpSpan:
        seen = self._seen.get((span.attempt_id, span.span_id))
        made = self._span(
            _key_of(span),
            name=span.name,
            times=(span.start_ns, span.end_ns),
            attributes={
                **allowed(span.attributes, has_contents=self._has_contents),
                **self._payload(span, seen),
                "agl.attempt_id": span.attempt_id,
                "agl.attempt": self._number(span.attempt_id),
                "agl.span_id": span.span_id,
                "agl.is_late": span.is_late or None,
            },
        )
        made.parent_span_id = self._parent(span)
        made.kind = _KINDS[span.kind]
        made.status.code = _STATUSES[span.status]
        if self._has_contents and span.status == "error":
            made.status.message = span.status_message
        for event in allowed_events(span.events, has_contents=self._has_contents):
            self._add_event(made, event)
        return made

    def _payload(self, span: Span, seen: Transition | None) -> Mapping[str, Json]:
        if span.call is not None:
            made = call_attributes(span.call, seen, has_contents=self._has_contents)
            record = {CALL_RECORD: _as_json(call_record(span.call))} if self._has_records else {}
            return {**{name: value for name, value in made.items() if value not in (None, "", [])}, **record}
        if span.reward is None:
            return {}
        record = {REWARD_RECORD: _as_json(span.reward)} if self._has_records else {}
        return {**_reward(span.reward), **record}

    def _parent(self, span: Span) -> bytes:
        """Return the parent's id in the trace: the framework's span if the span names one, else the recorded parent.

        If neither was recorded, the parent is the span of the attempt or of the rollout.
        """
        framework = span.attributes.get(semconv.FRAMEWORK_SPAN_ID)
        root = self._roots.get(span.attempt_id)
        for parent in (framework, span.parent_id):
            is_other = parent and parent != span.span_id and not (root and parent == root.span_id)
            if is_other and (span.attempt_id, parent) in self._known:
                return self._id(f"span {span.attempt_id} {parent}")
        is_below_attempt = self._has_several and self._number(span.attempt_id)
        return self._id(f"attempt {span.attempt_id}" if is_below_attempt else "rollout")

    def _number(self, attempt_id: str) -> int | None:
        return next((a.number for a in self._recording.attempts if a.attempt_id == attempt_id), None)

    def _span(self, key: str, *, name: str, times: tuple[int, int], attributes: Mapping[str, Json]) -> OtlpSpan:
        start, end = times
        made = OtlpSpan(
            trace_id=_digest(self._key, size=16),
            span_id=self._id(key),
            name=name.encode("utf-8", "replace").decode(),
            kind=OtlpSpan.SPAN_KIND_INTERNAL,
            start_time_unix_nano=max(start, 0),
            end_time_unix_nano=max(start, end, 0),
        )
        made.attributes.extend(key_values({**self._common, **attributes}))
        return made

    def _end(self, span: OtlpSpan, status: str, error: ErrorInfo | None) -> None:
        """Set the status of the span of a rollout or an attempt, and add the error that ended it."""
        span.status.code = _STATUSES[status]
        if status != "error" or error is None:
            return
        detail = {"exception.type": error.type, "exception.message": error.message}
        event = SpanEvent(
            name="exception",
            time_ns=span.end_time_unix_nano,
            attributes={**detail, "exception.stacktrace": error.traceback},
        )
        span.attributes.extend(key_values({semconv.ERROR_TYPE: error.type}))
        for kept in allowed_events((event,), has_contents=self._has_contents):
            self._add_event(span, kept)
        if self._has_contents:
            span.status.message = error.message.encode("utf-8", "replace").decode()

    def _add_event(self, span: OtlpSpan, event: SpanEvent) -> None:
        made = span.events.add()
        made.name, made.time_unix_nano = event.name, max(event.time_ns, 0)
        made.attributes.extend(key_values(event.attributes))

    def _id(self, key: str) -> bytes:
        return _digest(f"{self._key} {key}", size=8)


def _as_json(record: Json) -> str:
    try:
        return to_json(record).decode()
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(msgspec.to_builtins(record))


def _key_of(span: Span) -> str:
    return f"span {span.attempt_id} {span.span_id}"


def _reward(reward: Reward) -> dict[str, Json]:
    parts = {f"agl.reward.dimensions.{name}": value for name, value in reward.dimensions.items()}
    return {
        semconv.EVALUATION_NAME: reward.name or "reward",
        semconv.EVALUATION_SCORE: reward.value,
        "agl.reward.source": reward.source,
        "agl.reward.scope": reward.scope,
        "agl.reward.span_id": reward.span_id,
        **cast("dict[str, Json]", parts),
    }


def _digest(key: str, *, size: int) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=size).digest()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
