"""Which attempt the running code belongs to: one context variable, carried into tasks, threads and executors."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from agl.contracts import Upstream
from agl.schemas import Span


@dataclass(frozen=True, kw_only=True)
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


_CURRENT: ContextVar[Capture | None] = ContextVar("agl_capture", default=None)


def current() -> Capture | None:
    """The capture of the running attempt, ``None`` outside a rollout."""
    return _CURRENT.get()
