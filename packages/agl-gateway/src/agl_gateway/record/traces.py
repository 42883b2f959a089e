"""``POST /v1/traces``: the OTLP/HTTP endpoint, protobuf, with gzip and a limit on the decompressed size."""

from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agl.contracts import Store
from agl.errors import NotFoundError
from agl_gateway.access.identity import Identities, RunningAttempts, key_of, require_scope
from agl_gateway.access.quotas import Quotas
from agl_gateway.record.otlp import IngestResult, ingest
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.status.metrics import SpanRate
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken

PROTOBUF = "application/x-protobuf"
_MAX_BODY = 16 * 1024 * 1024


class TracesApi:
    """Takes spans from OpenTelemetry exporters."""

    def __init__(
        self,
        *,
        store: Store,
        identities: Identities,
        rate: SpanRate,
        bodies: BodyReader,
        attempts: RunningAttempts,
        quotas: Quotas,
    ) -> None:
        self._store = store
        self._identities = identities
        self._rate = rate
        self._bodies = bodies
        self._attempts = attempts
        self._quotas = quotas

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Take one export request; the answer counts rejected spans, if there are any."""
        claim = self._identities.verify(key_of(request.headers))
        require_scope(claim, ("attempt", "admin"), what="exporting traces")
        if request.content_type != PROTOBUF:
            raise Problem(
                415,
                f"the content type is {request.content_type!r}; only {PROTOBUF} is accepted: "
                "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
            )
        message = ExportTraceServiceRequest()
        try:
            message.ParseFromString(await self._bodies.read(request, limit=_MAX_BODY))
        except DecodeError as error:
            raise Problem(400, f"the body is not an OTLP trace request ({error}); send protobuf") from error
        found = ingest(message, claim)
        await self._drop_refused(found, claim)
        await self._quotas.add_spans(claim, len(found.spans))
        await self._append(found)
        return web.Response(body=_answer(found), content_type=PROTOBUF)

    async def _drop_refused(self, found: IngestResult, claim: AttemptToken) -> None:
        """Reject the spans that the attempt's token may no longer append."""
        reason = "" if claim.scope == "admin" else await self._attempts.refusal(claim, found.spans)
        if reason:
            kept = [span for span in found.spans if span.reward is None and span.call is None]
            for _ in range(len(found.spans) - len(kept)):
                found.reject(reason)
            found.spans = kept

    async def _append(self, found: IngestResult) -> None:
        """Write attempt by attempt, so that an unknown attempt loses only its own spans."""
        attempts = list(dict.fromkeys(span.attempt_id for span in found.spans))
        for attempt_id in attempts:
            own = [span for span in found.spans if span.attempt_id == attempt_id]
            try:
                await self._store.append_spans(own)
                self._rate.add(len(own))
            except NotFoundError as error:
                found.rejected += len(own)
                found.reason = found.reason or str(error)


def _answer(found: IngestResult) -> bytes:
    if not found.rejected:
        return ExportTraceServiceResponse().SerializeToString()
    partial = ExportTracePartialSuccess(rejected_spans=found.rejected, error_message=found.reason)
    return ExportTraceServiceResponse(partial_success=partial).SerializeToString()
