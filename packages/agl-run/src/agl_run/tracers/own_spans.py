"""Switches on the spans that frameworks make themselves, so that an agent needs no line for them.

pydantic-ai and Microsoft's Agent Framework report agents, tools and model calls in the standard ``gen_ai.*`` spans once
somebody asks them to; the tracer ``otel`` records these. Nothing is switched on that a user configured, or that a user
switched off where the framework can say so.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import ClassVar

from agl.tracing import Undo
from agl_run.tracers.module_tracer import ModuleTracer


def _pydantic_ai(module: ModuleType) -> list[Undo]:
    agent = module.Agent

    if getattr(agent, "_instrument_default", False) is not False:  # there is no public way to ask
        return []
    agent.instrument_all()

    def undo() -> None:
        if getattr(agent, "_instrument_default", True) is True:  # else the user has set it meanwhile
            agent.instrument_all(False)

    return [undo]


def _agent_framework(module: ModuleType) -> list[Undo]:
    settings = module.OBSERVABILITY_SETTINGS
    if settings.enable_instrumentation:
        return []
    settings.enable_instrumentation = True

    def undo() -> None:
        settings.enable_instrumentation = False

    return [undo]


class OwnSpans(ModuleTracer):
    """Switches on the frameworks' own spans while it is installed."""

    changes: ClassVar[Mapping[str, Callable[[ModuleType], Sequence[Undo]]]] = {
        "pydantic_ai": _pydantic_ai,
        "agent_framework.observability": _agent_framework,
    }
