"""A tracing backend for tests: a real HTTP server that decodes requests, and fails on demand."""

import gzip
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan


class ReceivedSpan:
    """A span as a backend shows it: hexadecimal ids, attributes as a dictionary."""

    def __init__(self, span: OtlpSpan, resource: dict[str, Any]) -> None:
        self.trace_id, self.span_id = span.trace_id.hex(), span.span_id.hex()
        self.parent_id = span.parent_span_id.hex()
        self.name, self.kind, self.status = span.name, span.kind, span.status
        self.attributes = {pair.key: value_of(pair.value) for pair in span.attributes}
        self.events = {e.name: {pair.key: value_of(pair.value) for pair in e.attributes} for e in span.events}
        self.times = (span.start_time_unix_nano, span.end_time_unix_nano)
        self.resource = resource


class Backend(ThreadingHTTPServer):
    """A server that receives OTLP over HTTP.

    Attributes:
        requests: All accepted requests.
        seen: Path and headers of every request.
        faults: Statuses and headers with which the next requests are refused.
        rejects: Number of spans that each response reports as rejected.
        is_open: Requests wait while this event is cleared.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.faults: deque[tuple[int, dict[str, str]]] = deque()
        self.rejects = 0
        self.is_open = threading.Event()
        self.is_open.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        return [
            ReceivedSpan(span, {pair.key: value_of(pair.value) for pair in group.resource.attributes})
            for request in [*self.requests]
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def rollouts(self) -> list[str]:
        """The ids of the received rollouts, in order, with repetitions."""
        return [str(span.attributes["agl.rollout_id"]) for span in self.spans if not span.parent_id]


class _Handler(BaseHTTPRequestHandler):
    server: Backend

    def do_POST(self) -> None:
        server = self.server
        body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        server.is_open.wait(30)
        status, headers = server.faults.popleft() if server.faults else (200, {})
        answer = ExportTraceServiceResponse()
        if status == 200:
            server.requests.append(ExportTraceServiceRequest.FromString(body))
        if server.rejects:
            answer.partial_success.rejected_spans = server.rejects
            answer.partial_success.error_message = "too old"
        data = answer.SerializeToString() if status == 200 else b"no"
        self.send_response(status)
        for key, value in {"Content-Type": "application/x-protobuf", **headers}.items():
            self.send_header(key, value)
        if "Transfer-Encoding" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, str(kind))
