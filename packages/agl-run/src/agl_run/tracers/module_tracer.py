"""Tracers that change modules when these are imported: the base class, and the tracer ``own-spans``.

``own-spans`` switches on the spans that frameworks create themselves, so that an agent needs no code for this.
pydantic-ai and Microsoft's Agent Framework report agents, tools and model calls in the standard ``gen_ai.*`` spans once
they are asked to, and the tracer ``otel`` records the spans. For smolagents, agno, LlamaIndex and DSPy, OpenInference's
packages make spans where they are installed. Nothing changes if the user has configured the spans, or has switched them
off in a framework that can tell this from its default.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from agl.contracts import Tracer
from agl.tracing import ImportWatch, Undo

_log = logging.getLogger("agl_run.run")


class ModuleTracer(Tracer):
    """Changes modules while any tracer of its class is installed; several tracers may be installed at once.

    Attributes:
        changes: For each module's name, the function that changes the module and returns functions to undo this.
    """

    changes: ClassVar[Mapping[str, Callable[[ModuleType], Sequence[Undo]]]] = {}
    _installed: ClassVar[set["ModuleTracer"]]
    _undo: ClassVar[list[Undo]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # One set for each kind of tracer: modules are changed once for all of its instances.
        cls._installed, cls._undo = set(), []

    def install(self) -> None:
        """Change the modules that are imported now or later; idempotent."""
        if not self._installed:
            watch = ImportWatch(
                tuple(self.changes), lambda module: self._undo.extend(self.changes[module.__name__](module))
            )
            watch.start()
            self._undo.append(watch.stop)
        self._installed.add(self)

    def uninstall(self) -> None:
        """Undo the changes if no other tracer of this class is installed."""
        self._installed.discard(self)
        # In reverse, so that of two patches on one method the outer one goes first.
        while self._undo and not self._installed:
            self._undo.pop()()


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


def _openinference(module: ModuleType) -> list[Undo]:
    package, name = _INSTRUMENTORS[module.__name__]
    try:
        instrumentor: Any = getattr(importlib.import_module(f"openinference.instrumentation.{package}"), name)()
    except ImportError:
        _log.warning(
            "%s does not name the agents of its calls; to record them, pip install openinference-instrumentation-%s",
            *(module.__name__.partition(".")[0], package.replace("_", "-")),
        )
        return []
    if instrumentor.is_instrumented_by_opentelemetry:
        return []
    instrumentor.instrument()
    return [instrumentor.uninstrument]


_INSTRUMENTORS = {
    "agno.agent": ("agno", "AgnoInstrumentor"),
    "dspy": ("dspy", "DSPyInstrumentor"),
    "llama_index.core": ("llama_index", "LlamaIndexInstrumentor"),
    "smolagents": ("smolagents", "SmolagentsInstrumentor"),
}
"""Modules of frameworks without spans, each with OpenInference's package and class that make spans for it."""


def cache_advice() -> str:
    """Return a sentence about DSPy's cache, which answers without a call, if DSPy is imported; else ``""``."""
    text = " DSPy answers repeated questions from its cache; to ask the model each time: dspy.LM(..., cache=False)."
    return text if "dspy" in sys.modules else ""


class OwnSpans(ModuleTracer):
    """Switches on the frameworks' own spans, or those that OpenInference makes for them, while it is installed."""

    changes: ClassVar[Mapping[str, Callable[[ModuleType], Sequence[Undo]]]] = {
        "pydantic_ai": _pydantic_ai,
        "agent_framework.observability": _agent_framework,
        **dict.fromkeys(_INSTRUMENTORS, _openinference),
    }
