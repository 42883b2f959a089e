"""Attributes model calls to agents in CrewAI, from the events of CrewAI's bus.

Every event that starts a scope becomes a span whose id is derived from the event's id. So the id is known when a model
call is sent, although CrewAI runs handlers later, in other threads and in any order. Model calls are recorded on the
wire; the span of a call's event only says which agent made it. A call of a program's own model that bypasses the wire,
and that no event reports, gets a span here.

CrewAI's telemetry, trace uploads and version check are turned off while a tracer is installed, through CrewAI's own
environment variables. ``OTEL_SDK_DISABLED`` is not used, because it would turn off all tracing of the process.
"""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from agl.tracing import ActiveAttempt, SharedTracer, Undo, around_attempts, current

if TYPE_CHECKING:
    from agl_crewai.listener import Listener

_QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "CREWAI_DISABLE_VERSION_CHECK": "true"}
_SCOPE_END_S = 5.0
"""Seconds to wait for CrewAI's handlers at the end of an attempt; they take milliseconds."""


class CrewAITracer(SharedTracer):
    """Observes CrewAI; see the module. Several tracers may be installed; they share one listener."""

    _listener: ClassVar["Listener | None"] = None

    def observe(self) -> Iterable[Undo]:
        """Import CrewAI and observe it."""
        yield _set_environment()  # before the import, at which CrewAI reads some of it
        from agl_crewai.listener import Listener, patches

        listener = CrewAITracer._listener = Listener()
        yield listener.listen()
        yield around_attempts(_observe)
        yield from patches()

    def current_span_id(self) -> str | None:
        """Return the id of CrewAI's innermost span here: of a model call, tool, agent, task, crew or flow."""
        if current() is None or self not in self._installed or self._listener is None:
            return None
        return self._listener.current_span_id()

    def flush(self, timeout_s: float) -> None:
        """Wait until CrewAI's handlers have received every event so far, for ``timeout_s`` seconds at most."""
        if self in self._installed and self._listener is not None:
            self._listener.flush(timeout_s)

    def worker_env(self) -> Mapping[str, str]:
        """Return CrewAI's own variables that turn off telemetry, trace uploads and version checks."""
        return dict(_QUIET)


@contextmanager
def _observe(attempt: ActiveAttempt) -> Generator[None]:
    """Start an attempt outside of scopes that CrewAI left open; when it ends, close the scopes that it left open."""
    from agl_crewai.listener import within_scope

    listener = CrewAITracer._listener  # pyright: ignore[reportPrivateUsage]  # this module's own
    if listener is None:
        yield
        return
    with within_scope(None):
        try:
            yield
        finally:
            listener.flush(_SCOPE_END_S)
            listener.close(attempt)


def _set_environment() -> Undo:
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return undo
