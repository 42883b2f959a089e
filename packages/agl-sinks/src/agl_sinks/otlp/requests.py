"""Packs the spans of rollouts into requests of a size that backends accept, to send them or to write them to a file.

``agl data export --format otlp`` writes whole rollouts, with contents and token ids, for collectors and for ``agl data
import``. The file has one JSON request per line; if its name ends in ``.pb``, it has Protobuf requests, each preceded
by the length. All fields of a call or a reward are in an attribute, as JSON.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

import agl
from agl.contracts import Recording
from agl.schemas import Episode, Json, to_json, unpack_floats
from agl_inspect.exports import Exported, ExportSetup, Losses
from agl_sinks.otlp.attributes import key_values
from agl_sinks.otlp.traces import spans_of

MAX_BYTES = 2 << 20
"""Largest size of the spans in one request, in bytes before compression; a single span may be larger."""

_UNFINISHED = "rollouts that are not finished: left out"
_OTHERS = "spans of attempts that did not decide: left out"
_REASONS = {
    "late": "model calls that were recorded after the attempt had ended: left out",
    "not_selected": "model calls of agents that --agents does not choose: left out",
}
_TARGETS = "rewards about spans that are not written: left out"
_NO_NUMBERS = "calls with log-probabilities that JSON has no numbers for (NaN, infinities): without any"
_CHANGED = "rollouts with halves of characters, which were replaced, or integers beyond 64 bits, now texts"


def requests_of(
    recordings: Sequence[Recording], *, has_contents: bool, has_records: bool = False, service: str = ""
) -> Iterator[ExportTraceServiceRequest]:
    """Yield the requests that send ``recordings``; a request holds spans of only one experiment.

    Args:
        recordings: Finished rollouts with all their spans.
        has_contents: Include messages, tasks and other texts.
        has_records: Include all fields of calls and rewards, such as token ids.
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
    """Return a request in OTLP's JSON form, with hexadecimal ids and enumerations as numbers."""
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


class OtlpWriter:
    """Writes rollouts as traces to the file of an export, in JSON or Protobuf."""

    reads_blobs = False

    def __init__(self, *, setup: ExportSetup) -> None:
        self._file, self._losses = setup.file, setup.losses
        self._is_protobuf = setup.path is not None and setup.path.suffix == ".pb"

    def write(self, item: Exported) -> int:
        """Write a rollout as one or more requests and return 1; an unfinished rollout is left out and gives 0."""
        rollout = item.recording.rollout
        if not rollout.is_finished:
            self._losses.add(_UNFINISHED, rollout.rollout_id)
            return 0
        kept = _decided(item.recording, item.episode, self._losses)
        for request in requests_of([kept], has_contents=True, has_records=True):
            if self._is_protobuf:
                data = request.SerializeToString()
                self._file.write(_varint(len(data)) + data)
            else:
                self._file.write(to_json(as_json(request)) + b"\n")
        return 1

    def close(self) -> None:
        """Do nothing: every rollout is already written."""


def _decided(recording: Recording, episode: Episode, losses: Losses) -> Recording:
    """Return the recording with only the spans to write, from the deciding attempt; count all others as losses."""
    rollout_id, attempt = recording.rollout.rollout_id, episode.attempt
    own = [span for span in recording.spans if attempt is not None and span.attempt_id == attempt.attempt_id]
    losses.add(_OTHERS, rollout_id, len(recording.spans) - len(own))
    left_out = {call.span_id: call.reject for call in episode.transitions if call.reject in _REASONS}
    known = {span.span_id for span in own} - left_out.keys()
    kept = [span for span in own if span.span_id in known]
    for span in own:
        if span.span_id in left_out:
            losses.add(_REASONS[left_out[span.span_id]], rollout_id)
        if span.call is not None and not all(map(math.isfinite, unpack_floats(span.call.logprobs))):
            losses.add(_NO_NUMBERS, rollout_id)
    written = [span for span in kept if not span.reward or span.reward.span_id in {None, *known}]
    losses.add(_TARGETS, rollout_id, len(kept) - len(written))
    try:
        to_json(written)
    except (UnicodeEncodeError, OverflowError):
        losses.add(_CHANGED, rollout_id)
    return msgspec.structs.replace(recording, attempts=[attempt] if attempt else [], spans=written)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
