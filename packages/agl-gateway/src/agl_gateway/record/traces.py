"""Receives OTLP/HTTP traces at ``POST /v1/traces``, so that any OpenTelemetry exporter can add spans to an attempt.

The body is protobuf, optionally compressed, with a limit on its decompressed size.

Spans that arrive with an attempt's own token are changed before they are stored: rewards get the source ``agent``,
model calls lose the name of the policy, and attributes that only a runner records are removed. So an agent can forge
neither training data nor the data that rewards rely on.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from agl import semconv
from agl.contracts import Store
from agl.errors import NotFoundError
from agl.schemas import Json, Reward, Span, SpanEvent, SpanStatus
from agl_gateway.access.identity import Admission, RunningAttempts
from agl_gateway.access.quotas import Quotas
from agl_gateway.record.redaction import Redaction
from agl_gateway.record.spool import SpanCount
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken

PROTOBUF = "application/x-protobuf"
_MAX_BODY = 16 * 1024 * 1024

ROLLOUT_ID = "agl.rollout_id"
ATTEMPT_ID = "agl.attempt_id"

_Kind = Literal["internal", "client", "server", "producer", "consumer"]
_KINDS: dict[int, _Kind] = {2: "server", 3: "client", 4: "producer", 5: "consumer"}
_STATUSES: dict[int, SpanStatus] = {1: "ok", 2: "error"}


@dataclass(kw_only=True)
class IngestResult:
    """The accepted and rejected spans of an export request.

    Attributes:
        spans: The accepted spans; each belongs to an attempt.
        rejected: The number of rejected spans.
        reason: The reason for the first rejection.
    """

    spans: list[Span] = field(default_factory=list[Span])
    rejected: int = 0
    reason: str = ""

    def reject(self, reason: str, count: int = 1) -> None:
        """Count rejected spans; ``reason`` stays only the first one given."""
        self.rejected += count
        self.reason = self.reason or reason


def ingest(request: ExportTraceServiceRequest, claim: AttemptToken) -> IngestResult:
    """Return the spans of ``request`` that ``claim`` may append.

    An attempt's token attaches everything to its attempt. With an admin token, each span or its resource names its
    attempt in ``agl.rollout_id`` and ``agl.attempt_id``.
    """
    found = IngestResult()
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                _add(found, span, resource, claim)
    return found


def _add(found: IngestResult, span: OtlpSpan, resource: dict[str, Json], claim: AttemptToken) -> None:
    attributes = _attributes(span.attributes)
    rollout_id, attempt_id = _owner(attributes, resource, claim)
    if not rollout_id or not attempt_id:
        found.reject(
            f"span {span.name!r} has no {ROLLOUT_ID} and {ATTEMPT_ID}; set them on the span or its resource, "
            "or export with the attempt's own token"
        )
    elif claim.scope != "admin" and (rollout_id, attempt_id) != (claim.rollout_id, claim.attempt_id):
        found.reject(f"span {span.name!r} names attempt {attempt_id!r}, and the token belongs to another one")
    elif len(span.span_id) != 8 or len(span.trace_id) != 16:
        found.reject(f"span {span.name!r} has no valid trace and span id")
    else:
        made = _span(span, attributes, rollout_id, attempt_id)
        if made.reward is not None and made.reward.fault:
            found.reject(f"span {span.name!r} has the score {made.reward.fault}; export a finite number")
        else:
            found.spans.append(made if claim.scope == "admin" else as_said_by_agent(made))


def _owner(attributes: dict[str, Json], resource: dict[str, Json], claim: AttemptToken) -> tuple[str, str]:
    rollout_id = attributes.pop(ROLLOUT_ID, None) or resource.get(ROLLOUT_ID) or claim.rollout_id
    attempt_id = attributes.pop(ATTEMPT_ID, None) or resource.get(ATTEMPT_ID) or claim.attempt_id
    return str(rollout_id), str(attempt_id)


def _span(span: OtlpSpan, attributes: dict[str, Json], rollout_id: str, attempt_id: str) -> Span:
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        span_id=span.span_id.hex(),
        trace_id=span.trace_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        kind=_KINDS.get(span.kind, "internal"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=_STATUSES.get(span.status.code, "unset"),
        status_message=span.status.message,
        attributes=attributes,
        events=tuple(_events(span.events)),
        reward=_reward(attributes),
    )


def _events(events: Sequence[OtlpSpan.Event]) -> Iterable[SpanEvent]:
    for event in events:
        yield SpanEvent(name=event.name, time_ns=event.time_unix_nano, attributes=_attributes(event.attributes))


def _reward(attributes: dict[str, Json]) -> Reward | None:
    """Return the reward of a span that follows the GenAI conventions for evaluations; ``None`` if it has no score."""
    score = attributes.get(semconv.EVALUATION_SCORE)
    if not isinstance(score, int | float):
        return None
    return Reward(
        value=float(score),
        name=str(attributes.get(semconv.EVALUATION_NAME, "")),
        feedback=str(attributes.get(semconv.EVALUATION_EXPLANATION, "")),
        source="evaluator",
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Json]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Json:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case _:
            return None


@dataclass(frozen=True, eq=False, kw_only=True)
class TracesApi:
    """Receives spans from OpenTelemetry exporters."""

    store: Store
    admission: Admission
    stored: SpanCount
    attempts: RunningAttempts
    quotas: Quotas
    redaction: Redaction

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Store one export request; the answer gives the number of rejected spans, if any."""
        claim = self.admission.caller(request, "attempt", "admin", what="exporting traces")
        if request.content_type != PROTOBUF:
            raise Problem(
                415,
                f"the content type is {request.content_type!r}; only {PROTOBUF} is accepted: "
                "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
            )
        message = ExportTraceServiceRequest()
        try:
            message.ParseFromString(await self.admission.bodies.read(request, limit=_MAX_BODY))
        except DecodeError as error:
            raise Problem(400, f"the body is not an OTLP trace request ({error}); send protobuf") from error
        found = ingest(message, claim)
        await self._drop_refused(found, claim)
        await self.quotas.add_spans(claim, len(found.spans))
        await self._append(found)
        return web.Response(body=_answer(found), content_type=PROTOBUF)

    async def _drop_refused(self, found: IngestResult, claim: AttemptToken) -> None:
        """Reject the rewards and model calls that the attempt's token may not append after the attempt has ended."""
        reason = "" if claim.scope == "admin" else await self.attempts.refusal(claim, found.spans)
        if reason:
            allowed = [span for span in found.spans if span.reward is None and span.call is None]
            found.reject(reason, len(found.spans) - len(allowed))
            found.spans = allowed

    async def _append(self, found: IngestResult) -> None:
        """Write the spans attempt by attempt, so that an unknown attempt loses only its own spans."""
        for attempt_id in dict.fromkeys(span.attempt_id for span in found.spans):
            own = await self.redaction.of([span for span in found.spans if span.attempt_id == attempt_id])
            try:
                await self.store.append_spans(own)
                self.stored.total += len(own)
            except NotFoundError as error:
                found.reject(str(error), len(own))


def _answer(found: IngestResult) -> bytes:
    if not found.rejected:
        return ExportTraceServiceResponse().SerializeToString()
    partial = ExportTracePartialSuccess(rejected_spans=found.rejected, error_message=found.reason)
    return ExportTraceServiceResponse(partial_success=partial).SerializeToString()


def spans_of_agent(claim: AttemptToken, spans: Sequence[Span]) -> list[Span]:
    """Return copies of ``spans`` without the data that an agent must not set; see :func:`as_said_by_agent`.

    Raises:
        Problem: 403 for a span of another attempt.
    """
    own = (claim.rollout_id, claim.attempt_id)
    for span in spans:
        if (span.rollout_id, span.attempt_id) != own:
            raise Problem(
                403,
                f"span {span.span_id!r} belongs to attempt {span.attempt_id!r} and the token to another one; "
                "append to your own attempt",
            )
    return [as_said_by_agent(span) for span in spans]


def as_said_by_agent(span: Span) -> Span:
    """Return a copy of a span without the data that an agent must not set: policy, runner attributes, order, lateness.

    The source of a reward becomes ``agent``.
    """
    replace = msgspec.structs.replace
    reward = replace(span.reward, source="agent") if span.reward else None
    call = replace(span.call, policy="") if span.call else None
    attributes = {name: value for name, value in span.attributes.items() if name not in semconv.RUNNER_ATTRIBUTES}
    return replace(span, reward=reward, call=call, attributes=attributes, sequence=0, is_late=False)
