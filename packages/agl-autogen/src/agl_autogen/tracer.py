"""Attributes model calls to agents in AutoGen, from the OpenTelemetry spans that AutoGen emits itself.

AutoGen reports agents and tools as ``gen_ai.*`` spans, which the core's OpenTelemetry tracer records. This tracer adds
arguments and results of tools, hand-offs, teams, and the agents without a span (the managers of teams that ask a model
for the next speaker, and agents written on ``autogen_core`` alone). Model calls are recorded on the wire, as AutoGen
reports them only when they are over; a call that bypasses the wire gets a span of its own. The runtime's spans, one
per message, are left out.
"""

from collections.abc import Iterable, Mapping

from agl.tracing import OtelTracer, SharedTracer, Undo


class AutoGenTracer(SharedTracer):
    """Observes AutoGen; see the module. Several may be installed at once; they share the patches."""

    def __init__(self) -> None:
        self._otel = OtelTracer()

    def observe(self) -> Iterable[Undo]:
        """Import AutoGen and patch it."""
        from agl_autogen import observe

        return observe.install()

    def install(self) -> None:
        """Observe AutoGen and OpenTelemetry from now on; idempotent."""
        self._otel.install()
        super().install()

    def uninstall(self) -> None:
        """Restore AutoGen when the last tracer is uninstalled."""
        self._otel.uninstall()
        super().uninstall()

    def current_span_id(self) -> str | None:
        """Id of the agent's or tool's span that is current in OpenTelemetry's context."""
        return self._otel.current_span_id()

    def worker_env(self) -> Mapping[str, str]:
        """AutoGen's switch for its runtime's spans, which it reads when a runtime is built."""
        return {"AUTOGEN_DISABLE_RUNTIME_TRACING": "true"}
