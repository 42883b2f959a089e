"""Attributes model calls to agents in AutoGen, from the OpenTelemetry spans that AutoGen emits itself.

AutoGen reports agents and tools as ``gen_ai.*`` spans, which the core's OpenTelemetry tracer records. This tracer adds
arguments and results of tools, hand-offs, teams, and the agents without a span (the managers of teams that ask a model
for the next speaker, and agents written on ``autogen_core`` alone). Model calls are recorded on the wire, as AutoGen
reports them only when they are over; a call that bypasses the wire gets a span of its own. The runtime's spans, one
per message, are left out.
"""

from collections.abc import Mapping
from typing import ClassVar

from agl.contracts import Tracer
from agl.tracing import OtelTracer, Undo


class AutoGenTracer(Tracer):
    """Observes AutoGen; see the module. Several may be installed at once; they share the patches."""

    _installed: ClassVar[set["AutoGenTracer"]] = set()
    _undo: ClassVar[list[Undo]] = []

    def __init__(self) -> None:
        self._otel = OtelTracer()

    def install(self) -> None:
        """Import AutoGen and observe it from now on; idempotent."""
        from agl_autogen import clients, observe

        self._otel.install()
        if not self._installed:
            self._undo.extend([*observe.install(), *clients.install()])
        self._installed.add(self)

    def uninstall(self) -> None:
        """Restore AutoGen when the last tracer is uninstalled."""
        self._otel.uninstall()
        self._installed.discard(self)
        while self._undo and not self._installed:
            self._undo.pop()()

    def current_span_id(self) -> str | None:
        """Id of the agent's or tool's span that is current in OpenTelemetry's context."""
        return self._otel.current_span_id()

    def worker_env(self) -> Mapping[str, str]:
        """AutoGen's switch for its runtime's spans, which it reads when a runtime is built."""
        return {"AUTOGEN_DISABLE_RUNTIME_TRACING": "true"}
