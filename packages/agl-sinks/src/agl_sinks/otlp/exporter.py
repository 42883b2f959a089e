"""The exporter that an experiment file names: finished rollouts as traces over OTLP."""

from collections.abc import Sequence

from agl.contracts import Recording
from agl_sinks.otlp.backend import Backend
from agl_sinks.otlp.requests import requests_of
from agl_sinks.sending import in_background


class OtlpExporter:
    """Sends each rollout as one trace. Its ids follow from the rollout's, so that sending it again adds nothing.

    Args:
        endpoint: The backend's base URL, or the whole one that ends in ``/v1/traces``; by default that of the
            variables ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` and ``OTEL_EXPORTER_OTLP_ENDPOINT``, or else
            ``http://localhost:4318``.
        headers_env: The environment variable with the backend's headers, such as its key, in OpenTelemetry's form
            ``name=value,name=value``; by default ``OTEL_EXPORTER_OTLP_TRACES_HEADERS`` or
            ``OTEL_EXPORTER_OTLP_HEADERS``.
        contents: Whether messages, tool calls, tasks, feedback and the texts of errors are sent too.
        service: The name of the service in the backend; by default the name of the experiment.
        timeout_s: Seconds that one request may take.

    Raises:
        ConfigError: The endpoint is no URL, or the variable is not set or has another form.
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
        self._backend = Backend.from_environment(endpoint, headers_env=headers_env, timeout_s=timeout_s)
        self._contents = contents
        self._service = service

    @property
    def destination(self) -> str:
        """The backend's URL, without a key in it."""
        return self._backend.shown

    async def export(self, recordings: Sequence[Recording]) -> None:
        """Send rollouts with all of their spans.

        Raises:
            ExportError: The backend cannot be reached, refuses a request, or rejects some of its spans.
        """
        made = await in_background(
            lambda: list(requests_of(recordings, has_contents=self._contents, service=self._service))
        )
        for request in made:
            await self._backend.send(request)

    async def close(self) -> None:
        """Nothing to release: every request has a connection of its own."""
