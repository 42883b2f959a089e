"""The core's own components, registered through the same hooks as a plugin's and imported when they are built."""

from collections.abc import Iterable

from agl._entries import CreditEntry, StoreEntry, TracerEntry
from agl._hookspecs import hookimpl


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """The store in memory."""
    yield StoreEntry(name="memory", factory="agl.stores:MemoryStore", summary="in this process, not durable")


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Tracers for OpenTelemetry spans and for model calls on the wire."""
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
    """Credit per episode."""
    yield CreditEntry(
        name="episode", factory="agl.episodes:EpisodeCredit", summary="the episode's return to every call"
    )
