"""Hears CrewAI's events and records spans: the start of a scope, its end in whatever order they arrive.

Handlers run in a copy of the emitter's context, so the rollout is the one that is current there.
"""

import importlib
import logging
import pkgutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import crewai.events.types as event_modules
from crewai.events import crewai_event_bus
from crewai.events.base_events import BaseEvent
from crewai.events.event_context import (
    SCOPE_ENDING_EVENTS,
    SCOPE_STARTING_EVENTS,
    get_current_parent_id,
    restore_event_scope,
)

from agl.tracing import Capture, Undo, current, current_scope, innermost
from agl_crewai import _convert

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Open:
    """A scope that has begun: in which attempt, below which span, and who makes the call if it is a model's."""

    capture: Capture
    parent_id: str
    event: BaseEvent
    client: dict[str, str]


class Listener:
    """Turns pairs of events into spans; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[str, _Open] = {}
        self._early: dict[str, tuple[Capture, BaseEvent]] = {}

    def listen(self) -> Undo:
        """Register with the bus; the returned function takes the handlers off again."""
        kinds = event_kinds()
        for kind in kinds:
            crewai_event_bus.on(kind)(self.hear)

        def undo() -> None:
            for kind in kinds:
                crewai_event_bus.off(kind, self.hear)

        return undo

    def hear(self, source: Any, event: BaseEvent) -> None:
        """One event of the bus; ``source`` is who emitted it."""
        capture = current()
        if capture is None:
            return
        try:
            if event.type in SCOPE_STARTING_EVENTS:
                self._begin(_Open(capture, _parent_of(event, capture), event, _convert.client_of(source, event)))
            else:
                self._end(capture, event)
        except Exception:  # noqa: BLE001  # isolation point: CrewAI would print it into the agent's output
            _log.exception("The CrewAI event %s could not be recorded.", event.type)

    def current_span_id(self) -> str | None:
        """Id of the span of the innermost scope in this context."""
        event_id, capture = get_current_parent_id(), current()
        if event_id is None or capture is None:
            return None
        span_id = _convert.span_id(event_id)
        capture.starts.setdefault(span_id, time.perf_counter_ns())  # its handler may not have run yet
        return span_id

    def flush(self, timeout_s: float) -> None:
        """Wait for the handlers of every event so far."""
        crewai_event_bus.flush(timeout=timeout_s)

    @contextmanager
    def fresh_context(self) -> Generator[None]:
        """Let no scope of an earlier run enclose this one: CrewAI leaves some open after a failure."""
        with _outside_of_every_scope():
            yield

    def close(self, capture: Capture) -> None:
        """Record what ``capture`` left open: scopes that CrewAI does not end when something in them fails."""
        with self._lock:
            left = [opened for opened in self._open.values() if opened.capture is capture]
            for opened in left:
                del self._open[opened.event.event_id]
            self._early = {key: early for key, early in self._early.items() if early[0] is not capture}
        for opened in left:
            capture.starts.pop(_convert.span_id(opened.event.event_id), None)
            capture.opened.pop(_convert.span_id(opened.event.event_id), None)
            capture.record(_convert.unended(opened.event, capture, opened.parent_id, opened.client))

    def _begin(self, opened: _Open) -> None:
        with self._lock:
            _, end = self._early.pop(opened.event.event_id, (None, None))
            if end is not None and not _convert.belong(opened.event, end):
                end = None
            if end is None:
                self._open[opened.event.event_id] = opened
                span_id = _convert.span_id(opened.event.event_id)
                opened.capture.starts[span_id] = _convert.clock_of(opened.event)
                opened.capture.opened[span_id] = lambda: _convert.unended(
                    opened.event, opened.capture, opened.parent_id, opened.client
                )
        if end is not None:
            self._record(opened, end)

    def _end(self, capture: Capture, event: BaseEvent) -> None:
        with self._lock:
            started_id = self._started_id(event)
            opened = self._open.pop(started_id, None)
            if opened is None and started_id:
                self._early[started_id] = (capture, event)
        if opened is not None:
            self._record(opened, event)

    def _started_id(self, event: BaseEvent) -> str:
        """The event that ``event`` ends: CrewAI's answer, or further out, where CrewAI left an inner scope open."""
        started_id = event.started_event_id or ""
        opened = self._open.get(started_id)
        while opened is not None and not _convert.belong(opened.event, event):
            started_id = opened.event.parent_event_id or ""
            opened = self._open.get(started_id)
        return started_id

    def _record(self, opened: _Open, end: BaseEvent) -> None:
        opened.capture.starts.pop(_convert.span_id(opened.event.event_id), None)
        opened.capture.opened.pop(_convert.span_id(opened.event.event_id), None)
        opened.capture.record(_convert.span_of(opened.event, end, opened.capture, opened.parent_id, opened.client))


def event_kinds() -> list[type[BaseEvent]]:
    """The classes of all events that begin or end a scope."""
    names = [module.name for module in pkgutil.iter_modules(event_modules.__path__)]
    modules = [importlib.import_module(f"{event_modules.__name__}.{name}") for name in names]
    found = {value for module in modules for value in vars(module).values() if _is_scope(value)}
    return sorted(found, key=lambda kind: kind.__name__)


def _is_scope(value: object) -> bool:
    if not isinstance(value, type) or not issubclass(value, BaseEvent):
        return False
    kind = value.model_fields["type"].default
    return kind in SCOPE_STARTING_EVENTS or kind in SCOPE_ENDING_EVENTS


def _parent_of(event: BaseEvent, capture: Capture) -> str:
    """The enclosing event's span, one of our operations within it, or what encloses the whole run."""
    if event.parent_event_id is None:
        with _outside_of_every_scope():
            return innermost(capture)
    parent_id, scope = _convert.span_id(event.parent_event_id), current_scope()
    return scope.span_id if scope is not None and scope.framework_id == parent_id else parent_id


@contextmanager
def _outside_of_every_scope() -> Generator[None]:
    from crewai.events import event_context

    stack = cast("Any", event_context)._event_id_stack
    before = stack.get()
    restore_event_scope(())
    try:
        yield
    finally:
        restore_event_scope(before)
