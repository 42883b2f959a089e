"""Registers this package's tracer without importing it."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import TracerEntry


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register the tracer of CrewAI's crews and flows."""
    yield TracerEntry(
        name="crewai",
        factory="agl_crewai.tracer:CrewAITracer",
        summary="CrewAI crews, flows, agents, tasks, tools and delegation",
        frameworks=("crewai",),
    )
