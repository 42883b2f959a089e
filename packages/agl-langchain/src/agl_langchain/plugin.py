"""Registers this package's tracer without importing it."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import TracerEntry


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register one tracer under two names, because LangGraph reports through LangChain's callbacks."""
    for name in ("langchain", "langgraph"):
        yield TracerEntry(
            name=name,
            factory="agl_langchain.tracer:LangChainTracer",
            summary="agents, graph nodes, tools and hand-offs of LangChain and LangGraph",
            frameworks=("langchain_core", "langgraph"),
        )
