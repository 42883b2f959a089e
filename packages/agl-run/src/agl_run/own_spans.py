"""Switches on the spans that frameworks make themselves, so that an agent needs no line for them.

pydantic-ai and Microsoft's Agent Framework report agents, tools and model calls in the standard ``gen_ai.*`` spans once
somebody asks them to; the tracer ``otel`` records these. Nothing is switched on that a user configured, or that a user
switched off where the framework can say so.
"""

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar

from agl.contracts import Tracer
from agl.tracing import ImportWatch, Undo


class OwnSpans(Tracer):
    """Switches on the frameworks' own spans while it is installed. Several may be installed at once."""

    _installed: ClassVar[set["OwnSpans"]] = set()
    _undo: ClassVar[list[Undo]] = []

    def install(self) -> None:
        """Switch them on in the frameworks that are imported now or later; idempotent."""
        if not self._installed:
            watch = ImportWatch(tuple(_SWITCHES), lambda module: self._undo.append(_SWITCHES[module.__name__](module)))
            watch.start()
            self._undo.append(watch.stop)
        self._installed.add(self)

    def uninstall(self) -> None:
        """Switch off what this tracer switched on when the last one is uninstalled."""
        self._installed.discard(self)
        while self._undo and not self._installed:
            self._undo.pop()()


def _pydantic_ai(module: ModuleType) -> Undo:
    agent = module.Agent

    if getattr(agent, "_instrument_default", False) is not False:  # there is no public way to ask
        return _nothing
    agent.instrument_all()

    def undo() -> None:
        if getattr(agent, "_instrument_default", True) is True:  # else the user has set it meanwhile
            agent.instrument_all(False)

    return undo


def _agent_framework(module: ModuleType) -> Undo:
    settings = module.OBSERVABILITY_SETTINGS
    if settings.enable_instrumentation:
        return _nothing
    settings.enable_instrumentation = True

    def undo() -> None:
        settings.enable_instrumentation = False

    return undo


def _nothing() -> None:
    """Undo nothing."""


_SWITCHES: dict[str, Callable[[ModuleType], Undo]] = {
    "pydantic_ai": _pydantic_ai,
    "agent_framework.observability": _agent_framework,
}
