"""Registers this package's tracer without importing it."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import TracerEntry


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register the tracer of AutoGen agents and teams."""
    yield TracerEntry(
        name="autogen",
        factory="agl_autogen.tracer:AutoGenTracer",
        summary="AutoGen agents, tools, teams and hand-offs",
        frameworks=("autogen_core", "autogen_agentchat"),
    )
