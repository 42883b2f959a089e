"""Attributes model calls to agents in AutoGen, from the OpenTelemetry spans that AutoGen emits itself.

AutoGen reports agents and tools as ``gen_ai.*`` spans, which the core's OpenTelemetry tracer records. This tracer adds
the arguments and results of tools, hand-offs, teams, and agents for which AutoGen makes no span: managers of teams that
ask a model for the next speaker, and agents written with only ``autogen_core``.

Model calls are recorded on the wire, because AutoGen reports them only when they are over; a call that bypasses the
wire gets a separate span. The spans of AutoGen's runtime, one per message, are left out.
"""

from collections.abc import Iterable, Mapping

from agl.tracing import OtelTracer, SharedTracer, Undo


class AutoGenTracer(SharedTracer):
    """Observes AutoGen; see the module. Several tracers may be installed; they share the patches."""

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
        """Stop observing OpenTelemetry; restore AutoGen if this is the last installed tracer."""
        self._otel.uninstall()
        super().uninstall()

    def current_span_id(self) -> str | None:
        """Return the id of the agent's or tool's span that is current in OpenTelemetry's context."""
        return self._otel.current_span_id()

    def worker_env(self) -> Mapping[str, str]:
        """Return the variable that turns off AutoGen's runtime spans; it is read when a runtime is built."""
        return {"AUTOGEN_DISABLE_RUNTIME_TRACING": "true"}
