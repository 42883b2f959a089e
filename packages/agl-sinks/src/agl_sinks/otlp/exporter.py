"""The exporter that sends finished rollouts to a tracing backend."""

import gzip
import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agl.contracts import Recording
from agl.errors import ConfigError, ExportError
from agl.urls import shown_url, web_parts
from agl_sinks.otlp.requests import requests_of
from agl_sinks.sending import in_background, post

PATH = "/v1/traces"
DEFAULT = "http://localhost:4318"
"""The default address of a collector."""

_PASSING = frozenset({429, 502, 503, 504})
"""Statuses after which a request may be repeated, according to the specification of OTLP over HTTP."""

_ADVICE = {
    401: "give its key in the variable that headers_env names",
    403: "give its key in the variable that headers_env names",
    404: f"check the path of the endpoint, to which {PATH} is added",
    405: f"check the path of the endpoint, to which {PATH} is added",
    413: "leave out the contents, or raise the backend's limit on the size of a request",
}
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
"""Matches valid values of HTTP headers."""

_PROTOBUF = "application/x-protobuf"


def _url(endpoint: str) -> str:
    whole = "" if endpoint else os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    url = whole or endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or DEFAULT
    parts = web_parts(url)
    if parts is None:
        raise ConfigError(
            f"the endpoint {shown_url(url)!r} is not the URL of a tracing backend; write http://HOST:PORT, and name "
            "the port for OTLP over HTTP, which is 4318 for most collectors"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"the endpoint {shown_url(url)!r} has a user or a password in it; send them as a header: "
            "Authorization=Basic%20..., in the variable that headers_env names"
        )
    return url if whole or parts.path.endswith(PATH) else f"{url.rstrip('/')}{PATH}"


def _headers(variable: str) -> dict[str, str]:
    """Read headers from a variable in OpenTelemetry's form, with names and values percent-encoded."""
    names = (variable,) if variable else ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    name = next((name for name in names if os.environ.get(name)), "")
    found: dict[str, str] = {}
    for part in filter(str.strip, os.environ.get(name, "").split(",")):
        key, equals, value = (unquote(word.strip()) for word in part.partition("="))
        if not equals or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", key) or not _VALUE.fullmatch(value):
            raise ConfigError(
                f"the environment variable {name} is not of the form name=value,name=value; write a header such as "
                "Authorization=Bearer%20KEY, with %20 for a space"
            )
        found[key] = value
    return found


def _parsed(content_type: str, body: bytes) -> ExportTraceServiceResponse:
    """Decode the backend's response; another content type counts as empty, which means that all spans were accepted."""
    try:
        return ExportTraceServiceResponse.FromString(body if content_type == _PROTOBUF else b"")
    except DecodeError:
        return ExportTraceServiceResponse()


def _count(request: ExportTraceServiceRequest) -> int:
    return sum(len(scope.spans) for group in request.resource_spans for scope in group.scope_spans)


class OtlpExporter:
    """Sends each rollout as one trace, whose ids are derived from the rollout's id: sending it again adds nothing.

    Args:
        endpoint: The backend's base URL, or its full URL, which ends in ``/v1/traces``. The default is
            ``$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, or else ``$OTEL_EXPORTER_OTLP_ENDPOINT``, or else
            ``http://localhost:4318``.
        headers_env: The environment variable with the backend's headers, such as its key, in OpenTelemetry's form
            ``name=value,name=value``; by default ``OTEL_EXPORTER_OTLP_TRACES_HEADERS`` or
            ``OTEL_EXPORTER_OTLP_HEADERS``.
        contents: Send messages, tool calls, tasks, feedback and the texts of errors too.
        service: The name of the service in the backend; by default the name of the experiment.
        timeout_s: Timeout of one request in seconds.

    Raises:
        ConfigError: The endpoint is not a valid URL, or the variable with the headers is not set or not valid.
    """

    def __init__(
        self,
        *,
        endpoint: str = "",
        headers_env: str = "",
        contents: bool = False,
        service: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        if headers_env and not os.environ.get(headers_env):
            raise ConfigError(
                f"headers_env names the environment variable {headers_env}, which is not set; set it to "
                "name=value,name=value, or leave headers_env out if the backend needs no key"
            )
        self._url, self._headers, self._timeout_s = _url(endpoint), _headers(headers_env), timeout_s
        self._contents = contents
        self._service = service

    @property
    def destination(self) -> str:
        """The backend's URL, without keys."""
        return shown_url(self._url)

    async def export(self, recordings: Sequence[Recording]) -> None:
        """Send rollouts with all their spans.

        Raises:
            ExportError: The backend cannot be reached, refuses a request, or rejects some of the spans.
        """
        made = await in_background(
            lambda: list(requests_of(recordings, has_contents=self._contents, service=self._service))
        )
        for request in made:
            await self._send(request)

    async def _send(self, request: ExportTraceServiceRequest) -> None:
        body = gzip.compress(request.SerializeToString(), compresslevel=1)
        answer = await in_background(lambda: self._post(body))
        rejected = answer.partial_success.rejected_spans
        if rejected:
            raise ExportError(
                f"{self.destination} rejected {rejected} of {_count(request)} spans: "
                f"{answer.partial_success.error_message or 'it gave no reason'}"
            )

    def _post(self, body: bytes) -> ExportTraceServiceResponse:
        answer = post(
            self._url,
            body,
            shown=self.destination,
            headers={"Content-Type": _PROTOBUF, "Content-Encoding": "gzip", **self._headers},
            timeout_s=self._timeout_s,
            passing=_PASSING,
            advice=_ADVICE,
        )
        return _parsed(answer.headers.get("Content-Type", "").partition(";")[0], answer.content)

    async def close(self) -> None:
        """Do nothing: every request uses its own connection."""
