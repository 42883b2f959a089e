"""Records spans from CrewAI's events, which may arrive in any order, and patches CrewAI where events do not suffice.

Handlers run in a copy of the emitter's context, so the current rollout in a handler is the emitter's. Outside of a
rollout every patch does nothing.

CrewAI's own clients emit an event for each call; a program's subclass of ``BaseLLM`` need not. All such classes,
including those defined later, are watched. A call that the wire hook saw, or that an event reports, gets no span here.

After a failure CrewAI does not end some of its scopes, and after a cancellation none. They stay in the caller's
context, whose next calls would then count as the failed agent's. So when an exception leaves a crew, a flow or an
agent, the scopes from before are restored.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, cast

import crewai.events.types as event_modules
from crewai import Agent, BaseLLM, Crew, Flow
from crewai.events import crewai_event_bus
from crewai.events.base_events import BaseEvent
from crewai.events.event_bus import CrewAIEventsBus
from crewai.events.event_context import (
    SCOPE_ENDING_EVENTS,
    SCOPE_STARTING_EVENTS,
    get_current_parent_id,
    restore_event_scope,
)

from agl.tracing import (
    ActiveAttempt,
    OpenSpan,
    Undo,
    around,
    around_async,
    current,
    current_span_id,
    note_model_call,
    open_span,
    patch,
    patch_subclasses,
)
from agl_crewai import _convert

_log = logging.getLogger(__name__)

_UNENDED = "CrewAI did not end it"


@dataclass(frozen=True)
class _OpenScope:
    """An open scope: the attempt, the start event and the span."""

    attempt: ActiveAttempt
    event: BaseEvent
    span: OpenSpan


class Listener:
    """Converts pairs of start and end events to spans; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[str, _OpenScope] = {}
        self._early: dict[str, tuple[ActiveAttempt, BaseEvent]] = {}

    def listen(self) -> Undo:
        """Register with the event bus; the returned function removes the handlers."""
        kinds = event_kinds()
        for kind in kinds:
            crewai_event_bus.on(kind)(self.handle)

        def undo() -> None:
            for kind in kinds:
                crewai_event_bus.off(kind, self.handle)

        return undo

    def handle(self, source: Any, event: BaseEvent) -> None:
        """Handle one event of the bus; ``source`` emitted it."""
        attempt = current()
        if attempt is None:
            return
        try:
            if event.type in SCOPE_STARTING_EVENTS:
                self._begin(_OpenScope(attempt, event, _open_span(source, event)))
            else:
                self._end(attempt, event)
        except Exception:  # noqa: BLE001  # isolation point: CrewAI would print it into the agent's output
            _log.exception("The CrewAI event %s could not be recorded.", event.type)

    def current_span_id(self) -> str | None:
        """Return the id of the span of the innermost scope in this context; the span may not be open yet."""
        event_id = get_current_parent_id()
        return None if event_id is None else _convert.span_id(event_id)

    def flush(self, timeout_s: float) -> None:
        """Wait until the handlers of all events so far have run, for ``timeout_s`` seconds at most."""
        crewai_event_bus.flush(timeout=timeout_s)

    def close(self, attempt: ActiveAttempt) -> None:
        """Close the spans of scopes that ``attempt`` left open, because CrewAI does not end some after a failure."""
        with self._lock:
            left = [opened for opened in self._open.values() if opened.attempt is attempt]
            for opened in left:
                del self._open[opened.event.event_id]
            self._early = {key: early for key, early in self._early.items() if early[0] is not attempt}
        for opened in left:
            opened.span.close(_UNENDED, end_ns=0)

    def _begin(self, opened: _OpenScope) -> None:
        with self._lock:
            _, end = self._early.pop(opened.event.event_id, (None, None))
            if end is None or not _convert.is_pair(opened.event, end):
                self._open[opened.event.event_id] = opened
                return
        opened.span.close(**_convert.about_end(end))

    def _end(self, attempt: ActiveAttempt, event: BaseEvent) -> None:
        with self._lock:
            started_id = self._started_id(event)
            opened = self._open.pop(started_id, None)
            if opened is None and started_id:
                self._early[started_id] = (attempt, event)
        if opened is not None:
            opened.span.close(**_convert.about_end(event))

    def _started_id(self, event: BaseEvent) -> str:
        """Return the id of the start event that ``event`` ends; if CrewAI's own is wrong, that of an outer scope."""
        started_id = event.started_event_id or ""
        opened = self._open.get(started_id)
        while opened is not None and not _convert.is_pair(opened.event, event):
            started_id = opened.event.parent_event_id or ""
            opened = self._open.get(started_id)
        return started_id


def event_kinds() -> list[type[BaseEvent]]:
    """Return the classes of all events that start or end a scope."""
    names = [module.name for module in pkgutil.iter_modules(event_modules.__path__)]
    modules = [importlib.import_module(f"{event_modules.__name__}.{name}") for name in names]
    found = {value for module in modules for value in vars(module).values() if _is_scope(value)}
    return sorted(found, key=lambda kind: kind.__name__)


def _is_scope(value: object) -> bool:
    if not isinstance(value, type) or not issubclass(value, BaseEvent):
        return False
    kind = value.model_fields["type"].default
    return kind in SCOPE_STARTING_EVENTS or kind in SCOPE_ENDING_EVENTS


def _open_span(source: Any, event: BaseEvent) -> OpenSpan:
    """Open a scope's span below the enclosing scope's span, or below another framework's span inside that scope."""
    with within_scope(event.parent_event_id):
        parent = current_span_id()
    return open_span(
        parent=parent,
        span_id=_convert.span_id(event.event_id),
        start_ns=_convert.time_of(event),
        is_current=False,
        **_convert.about_start(source, event),
    )


@contextmanager
def within_scope(event_id: str | None) -> Generator[None]:
    """Make the scope of this event CrewAI's current one during the block; ``None`` means no scope."""
    before = _scopes()
    restore_event_scope(() if event_id is None else ((event_id, ""),))
    try:
        yield
    finally:
        restore_event_scope(before)


@contextmanager
def _left_with_exception(_: Any) -> Generator[None]:
    """Restore CrewAI's scopes from before the block if an exception leaves it."""
    before = _scopes()
    try:
        yield
    except BaseException:
        restore_event_scope(before)
        raise


def _scopes() -> tuple[tuple[str, str], ...]:
    from crewai.events import event_context

    return cast("Any", event_context)._event_id_stack.get()


def patches() -> Iterator[Undo]:
    """Patch CrewAI; yields the functions that restore the originals."""
    # Subclasses of the program's own only: CrewAI's clients report by events.
    yield patch_subclasses(BaseLLM, {"call": around(_open_call), "acall": around_async(_open_call)}, besides="crewai")
    yield patch(CrewAIEventsBus, "emit", _noting_model_calls)
    # The functions that run in their caller's context, where a scope that stays open does harm.
    yield patch(Crew, "kickoff", around(_left_with_exception))
    yield patch(Crew, "akickoff", around_async(_left_with_exception))
    yield patch(_defining(Flow, "kickoff_async"), "kickoff_async", around_async(_left_with_exception))
    yield patch(Agent, "kickoff_async", around_async(_left_with_exception))


def _open_call(model: BaseLLM) -> OpenSpan:
    client = _convert.class_name(model)
    return open_span(client=client, server=model.base_url, model=model.model, unless_called=True)


def _defining(kind: type[Any], name: str) -> type[Any]:
    """Return the class that defines a method, because CrewAI does not export the class that defines those of flows."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _noting_model_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note model calls when their events are emitted, because the handlers run later and in other threads."""

    @wraps(original)
    def emit(self: CrewAIEventsBus, source: Any, event: Any, **options: Any) -> Any:
        if current() is not None and _convert.is_model_call(event):
            note_model_call()
        return original(self, source, event, **options)

    return emit
