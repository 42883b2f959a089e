"""The components of ``agl-core``, registered through the same hooks as a plugin's and imported when built."""

from collections.abc import Iterable

from agl._entries import CreditEntry, StoreEntry, TracerEntry
from agl._hookspecs import hookimpl


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Register the store in memory."""
    yield StoreEntry(name="memory", factory="agl.stores:MemoryStore", summary="in this process, not durable")


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register the tracers of OpenTelemetry spans and of model calls on the wire."""
    yield TracerEntry(
        name="otel",
        factory="agl.tracing:OtelTracer",
        summary="OpenTelemetry spans that end in a rollout",
        frameworks=("opentelemetry",),
    )
    yield TracerEntry(
        name="wire",
        factory="agl.tracing:WireTracer",
        summary="model calls through httpx, recorded in the process",
        frameworks=("httpx", "httpx2"),
    )


@hookimpl
def agl_credits() -> Iterable[CreditEntry]:
    """Register the credit assignment ``episode``."""
    yield CreditEntry(
        name="episode", factory="agl.episodes:EpisodeCredit", summary="the episode's return to every call"
    )
