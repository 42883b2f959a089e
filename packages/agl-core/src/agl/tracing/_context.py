"""Which attempt the running code belongs to: one context variable, carried into tasks, threads and executors.

:func:`activate` is the only door into a rollout. While at least one rollout is active in the process, threads and
executors carry context variables and HTTP clients are watched; after the last one the originals are back.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

from agl.contracts import Responder, Tracer, Upstream
from agl.schemas import Span
from agl.tracing import _process as process

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Capture:
    """The attempt that is current here.

    Attributes:
        rollout_id: With ``attempt_id`` the identity of everything that is recorded.
        trace_id: Trace of all spans made in this attempt, 32 hex digits.
        root_span_id: Span around the whole attempt; the parent of spans without another, 16 hex digits.
        record: Takes a finished span; thread-safe, never blocks, never raises.
        token: The attempt's signed token; the API key that clients send to the gateway.
        gateway_url: Base URL of the gateway without ``/v1``; ``""`` when calls are recorded in this process.
        upstreams: The configured policies; calls to their models are redirected to the gateway.
        current_span_id: Id of the framework span that is current, from the installed tracers; ``None`` if none.
        closers: Called once when the attempt's activation ends; model calls that are still open record themselves.
        starts: When the open spans of frameworks started, in nanoseconds of any clock, by span id. Where several
            frameworks have a current span, the one that started last is the innermost.
        tracers: The installed tracers.
        opened: How each open span would look if it ended now, by span id; what :func:`agl.tracing.who` reads.
        responder: Answers model calls in place of the model, such as in a replay.
    """

    rollout_id: str
    attempt_id: str
    trace_id: str
    root_span_id: str
    record: Callable[[Span], None]
    token: str = field(default="", repr=False)
    gateway_url: str = ""
    upstreams: tuple[Upstream, ...] = ()
    current_span_id: Callable[[], str | None] = field(default=lambda: None, repr=False)
    closers: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]], repr=False)
    starts: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    tracers: tuple[Tracer, ...] = field(default=(), repr=False)
    opened: dict[str, Callable[[], Span]] = field(default_factory=dict[str, Callable[[], Span]], repr=False)
    responder: Responder | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Scope:
    """An operation that is open: its span, and the framework span that was current when it began."""

    span_id: str
    framework_id: str | None


_CURRENT: ContextVar[Capture | None] = ContextVar("agl_capture", default=None)
_SCOPE: ContextVar[Scope | None] = ContextVar("agl_scope", default=None)


def current() -> Capture | None:
    """The capture of the running attempt, ``None`` outside a rollout."""
    return _CURRENT.get()


def current_scope() -> Scope | None:
    """The innermost open operation, ``None`` if there is none."""
    return _SCOPE.get()


def set_scope(scope: Scope | None) -> None:
    """Make ``scope`` the innermost operation of this context."""
    _SCOPE.set(scope)


class activate:  # noqa: N801  # used like a function: with agl.tracing.activate(capture)
    """Make ``capture`` current for the body, with everything that must be patched for it.

    Activations nest and overlap freely between tasks and threads; enter and leave one in the same context. What the
    body leaves open (streams that nobody read to their end) is recorded as incomplete when it ends. One that is
    entered and never left stays for the rest of the process.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._stack = ExitStack()

    def __enter__(self) -> Capture:
        with self._stack as stack:
            process.hold(self)
            stack.callback(process.release, self)
            stack.callback(_SCOPE.reset, _SCOPE.set(None))
            stack.callback(_CURRENT.reset, _CURRENT.set(self._capture))
            stack.callback(_close, self._capture)
            process.enter_scopes(stack, self._capture)
            self._stack = stack.pop_all()
        return self._capture

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def current_span_id() -> str | None:
    """Id of the innermost span: the framework's, an operation's, or the attempt's root; ``None`` outside a rollout."""
    capture = _CURRENT.get()
    return None if capture is None else innermost(capture)


def innermost(capture: Capture) -> str:
    """The innermost span of ``capture`` in this context; see :func:`current_span_id`."""
    framework, scope = framework_span_id(capture), _SCOPE.get()
    if scope is not None and framework in (None, scope.framework_id):
        return scope.span_id
    return framework or capture.root_span_id


def framework_span_id(capture: Capture) -> str | None:
    """What the tracers say; a tracer that fails is logged and counts as knowing nothing."""
    try:
        return capture.current_span_id()
    except Exception:  # noqa: BLE001  # isolation point
        _log.exception("A tracer failed to name its current span; the call is attached to the enclosing operation.")
        return None


def _close(capture: Capture) -> None:
    while capture.closers:
        _, close = capture.closers.popitem()
        try:
            close()
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("An open model call of attempt %s could not be recorded.", capture.attempt_id)
