"""Registers this package's tracer without importing it."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import TracerEntry


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register the tracer of the OpenAI Agents SDK."""
    yield TracerEntry(
        name="openai-agents",
        factory="agl_openai_agents.tracer:OpenAIAgentsTracer",
        summary="agents, tools and hand-offs of the OpenAI Agents SDK",
        frameworks=("agents",),
    )
