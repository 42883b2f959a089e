"""Holds the current attempt with its open spans in a context variable, and buffers finished spans.

Only :func:`agl.tracing.activate` makes an attempt current.
"""

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from agl.contracts import Responder, Tracer, Upstream
from agl.schemas import Span
from agl.tracing._spans import check_reward

if TYPE_CHECKING:
    from agl.tracing._open_span import OpenSpan

_log = logging.getLogger(__name__)


class OpenItem(Protocol):
    """A span or a model call that has begun and not ended.

    Attributes:
        since: The time at which the item began, by ``time.perf_counter_ns``.
    """

    since: int

    def abandon(self) -> None:
        """Record the item in its present state, because the attempt ends; called once, after :meth:`OpenSpans.take`."""
        ...


class OpenSpans:
    """The spans and model calls of one attempt that have not ended, by id. Any thread may use it at any time."""

    def __init__(self) -> None:
        self._open: dict[str, OpenItem] = {}
        # Spans that a tracer named as current before it opened them, with the time of the first
        # mention, which is the best known start.
        self._named: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of open spans and calls."""
        return len(self._open)

    def add(self, span_id: str, opened: OpenItem) -> None:
        """Add a span or call that has begun."""
        self._named.pop(span_id, None)
        self._open[span_id] = opened

    def get(self, span_id: str) -> OpenItem | None:
        """The open span or call with this id; ``None`` for an unknown id."""
        return self._open.get(span_id)

    def take(self, span_id: str) -> OpenItem | None:
        """Remove and return the open item with this id, for the caller to end; ``None`` if it was taken before."""
        return self._open.pop(span_id, None)

    def since(self, span_id: str) -> int:
        """The time at which a span began; if its tracer has not opened it yet, the time at which it was first named."""
        # A dict's methods are atomic in CPython, so no lock is needed for one step.
        opened = self._open.get(span_id)
        return opened.since if opened is not None else self._named.setdefault(span_id, time.perf_counter_ns())

    def abandon_all(self) -> None:
        """Record all open spans and calls in their present state, newest first, because the attempt ends."""
        # The newest first, so that children end before their parents.
        for span_id in reversed(tuple(self._open)):
            if (opened := self.take(span_id)) is not None:
                opened.abandon()


@dataclass(frozen=True, kw_only=True, eq=False)
class ActiveAttempt:
    """The attempt to which the running code belongs; runners make it, :func:`agl.current` returns it.

    Attributes:
        rollout_id: The rollout's id, which every recorded span has.
        attempt_id: The attempt's id, which every recorded span has.
        trace_id: Trace id of all spans that are made in this attempt, 32 hex digits.
        root_span_id: Id of the span around the whole attempt, 16 hex digits; the parent of spans without another
            parent.
        record: Takes a finished span; must be thread-safe and never block. Call :meth:`add` instead, which handles
            errors of ``record``.
        token: The attempt's signed token; clients send it to the gateway as their API key.
        gateway_url: Base URL of the gateway without ``/v1``; ``""`` if calls are recorded in this process.
        upstreams: The configured policies; calls to their models are redirected to the gateway.
        tracers: The installed tracers, each of which knows the current span of its framework.
        responder: Answers model calls in place of the model, such as in a replay.
        spans: The attempt's open spans and model calls; :func:`agl.tracing.open_span` adds to them.
    """

    rollout_id: str
    attempt_id: str
    trace_id: str
    root_span_id: str
    record: Callable[[Span], None]
    token: str = field(default="", repr=False)
    gateway_url: str = ""
    upstreams: tuple[Upstream, ...] = ()
    tracers: tuple[Tracer, ...] = field(default=(), repr=False)
    responder: Responder | None = field(default=None, repr=False)
    spans: OpenSpans = field(default_factory=OpenSpans, repr=False, init=False)

    def add(self, span: Span) -> None:
        """Record a finished span. A recorder's failure is logged and never reaches the agent.

        Raises:
            CaptureError: The span brings a reward that is NaN or infinite.
        """
        # Here and not only in the store: the agent's own traceback shows where the number came
        # from.
        check_reward(span.reward, span.rollout_id)
        try:
            self.record(span)
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The span %r of attempt %s could not be recorded.", span.name, self.attempt_id)


class SpanRecorder:
    """A thread-safe buffer of finished spans, in the order in which they finished.

    The agent's threads only append; the runner drains the buffer while the attempt runs and once more at its end.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[Span] = []

    def __len__(self) -> int:
        """The number of buffered spans."""
        return len(self._spans)

    def record(self, span: Span) -> None:
        """Add a finished span; never raises."""
        with self._lock:
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """Remove and return all buffered spans, oldest first."""
        with self._lock:
            taken, self._spans = self._spans, []
        return taken


EnteredSpans: TypeAlias = "tuple[OpenSpan, Any] | None"
"""The spans that a context has entered, as a linked list from the last entered one; ``None`` for no span."""

# A context variable and no global: many rollouts run in one process, in tasks and threads.
CURRENT: ContextVar[ActiveAttempt | None] = ContextVar("agl_attempt", default=None)
ENTERED: ContextVar[EnteredSpans] = ContextVar("agl_entered_spans", default=None)


def current() -> ActiveAttempt | None:
    """The attempt to which the running code belongs; ``None`` outside a rollout."""
    return CURRENT.get()


def entered_spans() -> EnteredSpans:
    """The spans that this context has entered, from the innermost open one; spans that ended inside it are dropped."""
    found = ENTERED.get()
    # The usual case needs no write.
    if found is None or found[0].is_open:
        return found
    while found is not None and not found[0].is_open:
        found = found[1]
    ENTERED.set(found)
    return found


def enter(span: "OpenSpan") -> None:
    """Make a span the innermost one of this context."""
    ENTERED.set((span, entered_spans()))


def leave(span: "OpenSpan") -> None:
    """If ``span`` is the innermost span of this context, make the span around it the innermost one."""
    found = ENTERED.get()
    # Closed in another context, or out of order: entered_spans drops it there.
    if found is not None and found[0] is span:
        ENTERED.set(found[1])


def current_span_id() -> str | None:
    """Id of the innermost span around the running code, see :func:`innermost`; ``None`` outside a rollout."""
    attempt = CURRENT.get()
    return None if attempt is None else innermost(attempt)


def innermost(attempt: ActiveAttempt) -> str:
    """Id of the innermost span around the running code; the attempt's root if there is no other.

    The candidates are the span that this context has entered last and the current span that each tracer names; of
    these, the one that began last is the innermost.
    """
    here = entered_spans()
    while here is not None and not (here[0].attempt is attempt and here[0].is_parent and here[0].is_open):
        here = here[1]
    # -1: every other span began after the root.
    span_id, since = (attempt.root_span_id, -1) if here is None else (here[0].span_id, here[0].since)
    for tracer in attempt.tracers:
        named = _span_named_by(tracer)
        # Both spans enclose the running code, so the one that began later is inside the other.
        if named is not None and named != span_id and (began := attempt.spans.since(named)) > since:
            span_id, since = named, began
    return span_id


def _span_named_by(tracer: Tracer) -> str | None:
    try:
        return tracer.current_span_id()
    except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
        _log.exception("A tracer failed to name its current span; the enclosing span is used instead.")
        return None
