"""Packs the spans of rollouts into requests of a size that backends accept."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

import agl
from agl.contracts import Recording
from agl.schemas import Json
from agl_sinks.otlp.attributes import key_values
from agl_sinks.otlp.traces import spans_of

MAX_BYTES = 2 << 20
"""Bytes of spans in one request, before compression; one span may be larger."""


def requests_of(
    recordings: Sequence[Recording], *, has_contents: bool, has_records: bool = False, service: str = ""
) -> Iterator[ExportTraceServiceRequest]:
    """Make the requests that send ``recordings``, grouped by experiment.

    Args:
        recordings: Finished rollouts with all of their spans.
        has_contents: Whether messages, tasks and other texts are included.
        has_records: Whether calls and rewards have all of their fields, token ids included.
        service: The name of the service; by default the name of the experiment.
    """
    for experiment, own in groupby(recordings, key=lambda recording: recording.rollout.experiment):
        spans = (
            span
            for recording in own
            for span in spans_of(recording, has_contents=has_contents, has_records=has_records)
        )
        for batch in _batches(spans):
            yield _request(batch, experiment=experiment, service=service or experiment or "agl")


def as_json(request: ExportTraceServiceRequest) -> Json:
    """Return a request in the JSON form of OTLP, in which ids are hexadecimal and enumerations are numbers."""
    return _with_hex_ids(MessageToDict(request, use_integers_for_enums=True), request)


def _with_hex_ids(data: dict[str, Json], request: ExportTraceServiceRequest) -> Json:
    for group, made in zip(data["resourceSpans"], request.resource_spans, strict=True):
        for scope, made_scope in zip(group["scopeSpans"], made.scope_spans, strict=True):
            for span, made_span in zip(scope["spans"], made_scope.spans, strict=True):
                ids = (made_span.trace_id, made_span.span_id, made_span.parent_span_id)
                fields = zip(("traceId", "spanId", "parentSpanId"), ids, strict=True)
                span.update({name: value.hex() for name, value in fields if value})
    return data


def _batches(spans: Iterable[OtlpSpan]) -> Iterator[list[OtlpSpan]]:
    batch: list[OtlpSpan] = []
    size = 0
    for span in spans:
        own = span.ByteSize()
        if batch and size + own > MAX_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(span)
        size += own
    if batch:
        yield batch


def _request(spans: Sequence[OtlpSpan], *, experiment: str, service: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    about = {"service.name": service, "agl.experiment": experiment, "telemetry.sdk.language": "python"}
    project = {"openinference.project.name": service}  # the project in Phoenix
    group.resource.attributes.extend(key_values({**about, **project}))
    scope = group.scope_spans.add()
    scope.scope.name, scope.scope.version = "agl", agl.__version__
    scope.spans.extend(spans)
    return request
