"""Spans of foreign OpenTelemetry instrumentation, taken into the rollout in which they start.

Covers every library that reports through the global tracer provider, with no code for any of them. A user's provider
is used where there is one and is never replaced; its sampler decides what exists at all. Processors cannot be taken
off a provider, so ours stays on it, switched off, after :meth:`OtelTracer.uninstall`.
"""

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, format_span_id, format_trace_id

from agl._who import NAMING
from agl.schemas import Span, SpanEvent, SpanStatus
from agl.tracing import _process as process
from agl.tracing._context import Capture, current, current_scope, framework_span_id, innermost
from agl.tracing._emitters import plain

_log = logging.getLogger(__name__)

_STATUS: dict[StatusCode, SpanStatus] = {StatusCode.UNSET: "unset", StatusCode.OK: "ok", StatusCode.ERROR: "error"}
_STILL_OPEN = "still open when the attempt ended"


@dataclass(frozen=True)
class _Open:
    """A span that has started: where it belongs, and the span itself in case it never ends."""

    capture: Capture
    parent_id: str
    span: SdkSpan


class RolloutProcessor(SpanProcessor):
    """Records the spans that start inside a rollout, when they end or when the rollout does."""

    def __init__(self) -> None:
        self._users: set[int] = set()
        self._open: dict[str, _Open] = {}
        self._lock = Lock()

    def switch(self, user: int, *, is_on: bool) -> None:
        """Note whether ``user`` wants spans; none are taken while nobody does."""
        with self._lock:
            (self._users.add if is_on else self._users.discard)(user)

    def is_open(self, span_id: str) -> bool:
        """Whether the span belongs to a rollout and has not ended."""
        return span_id in self._open

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        """Remember the rollout that is current now; the span may end in another context."""
        capture = current()
        if capture is None or not self._users:
            return
        try:
            span_id, opened = _id_of(span), _Open(capture, _parent_of(span, capture), span)
            self._open[span_id] = opened
            capture.opened[span_id] = lambda: _named(span, opened)
            capture.starts[span_id] = time.perf_counter_ns()
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The start of the OpenTelemetry span %r could not be observed.", span.name)

    def on_end(self, span: ReadableSpan) -> None:
        """Record the span."""
        try:
            opened = self._open.pop(_id_of(span), None)
            if opened is not None:
                opened.capture.starts.pop(_id_of(span), None)
                opened.capture.opened.pop(_id_of(span), None)
                opened.capture.record(_converted(span, opened))
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The OpenTelemetry span %r could not be recorded.", span.name)

    def close(self, capture: Capture) -> None:
        """Record what ``capture`` left open, as it is now."""
        for opened in tuple(self._open.values()):
            if opened.capture is capture:
                self.on_end(opened.span)


_PROCESSORS: WeakKeyDictionary[TracerProvider, RolloutProcessor] = WeakKeyDictionary()


class OtelTracer:
    """Takes OpenTelemetry spans into rollouts; see the module."""

    def __init__(self) -> None:
        self._processor: RolloutProcessor | None = None

    def install(self) -> None:
        """Add our processor to the global provider; set a provider if the process has none."""
        if self._processor is None:
            self._processor = _processor_of(_provider())
        self._processor.switch(id(self), is_on=True)
        process.add_scope(self._scope)

    def uninstall(self) -> None:
        """Switch our processor off; the provider stays, as OpenTelemetry has no way to take it back."""
        process.remove_scope(self._scope)
        if self._processor is not None:
            self._processor.switch(id(self), is_on=False)

    def current_span_id(self) -> str | None:
        """Id of OpenTelemetry's current span if it belongs to a rollout."""
        found = trace.get_current_span().get_span_context()
        span_id = format_span_id(found.span_id)
        return span_id if self._processor is not None and self._processor.is_open(span_id) else None

    def flush(self, timeout_s: float) -> None:
        """Nothing waits: a span is recorded while it ends."""

    def worker_env(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    @contextmanager
    def _scope(self, capture: Capture) -> Generator[None]:
        """Make the attempt's root OpenTelemetry's current span, so that foreign spans join its trace."""
        token = otel_context.attach(trace.set_span_in_context(NonRecordingSpan(_root_of(capture))))
        try:
            yield
        finally:
            otel_context.detach(token)
            if self._processor is not None:
                self._processor.close(capture)


def _provider() -> TracerProvider:
    found = trace.get_tracer_provider()
    if isinstance(found, TracerProvider):
        return found
    made = TracerProvider(span_limits=SpanLimits(max_span_attributes=SpanLimits.UNSET))
    trace.set_tracer_provider(made)
    return made


def _processor_of(provider: TracerProvider) -> RolloutProcessor:
    found = _PROCESSORS.get(provider)
    if found is None:
        found = _PROCESSORS[provider] = RolloutProcessor()
        provider.add_span_processor(found)
    return found


def _root_of(capture: Capture) -> SpanContext:
    return SpanContext(
        trace_id=int(capture.trace_id, 16),
        span_id=int(capture.root_span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _parent_of(span: ReadableSpan, capture: Capture) -> str:
    """OpenTelemetry's parent, unless an operation, or another framework's span, is within that parent."""
    parent_id = format_span_id(span.parent.span_id) if span.parent else capture.root_span_id
    if parent_id == capture.root_span_id or _is_within(capture, parent_id):
        return innermost(capture)
    scope = current_scope()
    return scope.span_id if scope is not None and scope.framework_id == parent_id else parent_id


def _is_within(capture: Capture, parent_id: str) -> bool:
    """Whether a framework's current span began within OpenTelemetry's current one, the span's parent."""
    found = format_span_id(trace.get_current_span().get_span_context().span_id)
    inner = framework_span_id(capture) if found == parent_id else None
    return inner is not None and capture.starts.get(inner, 0) > capture.starts.get(parent_id, 0)


def _id_of(span: ReadableSpan) -> str:
    found = span.get_span_context()
    return format_span_id(found.span_id) if found else ""


def _named(span: ReadableSpan, opened: _Open) -> Span:
    """An open span as far as its names go; its texts may be large, and are not looked at."""
    attributes = span.attributes or {}
    return Span(
        rollout_id=opened.capture.rollout_id,
        attempt_id=opened.capture.attempt_id,
        span_id=_id_of(span),
        parent_id=opened.parent_id,
        name=span.name,
        kind=span.kind.name.lower(),  # pyright: ignore[reportArgumentType]  # the five names are ours too
        attributes={key: str(attributes[key]) for key in NAMING if key in attributes},
    )


def _converted(span: ReadableSpan, opened: _Open) -> Span:
    found = span.get_span_context()
    is_ended = span.end_time is not None
    return Span(
        rollout_id=opened.capture.rollout_id,
        attempt_id=opened.capture.attempt_id,
        span_id=_id_of(span),
        trace_id=format_trace_id(found.trace_id) if found else opened.capture.trace_id,
        parent_id=opened.parent_id,
        name=span.name,
        kind=span.kind.name.lower(),  # pyright: ignore[reportArgumentType]  # the five names are ours too
        start_ns=span.start_time or 0,
        end_ns=span.end_time or time.time_ns(),
        status=_STATUS[span.status.status_code] if is_ended else "error",
        status_message=plain(span.status.description or "") if is_ended else _STILL_OPEN,
        attributes=_attributes(span),
        events=tuple(
            SpanEvent(name=event.name, time_ns=event.timestamp, attributes=plain(dict(event.attributes or {})))
            for event in span.events
        ),
    )


def _attributes(span: ReadableSpan) -> dict[str, Any]:
    found: dict[str, Any] = plain(dict(span.attributes or {}))
    if span.instrumentation_scope is not None:
        found.setdefault("otel.scope.name", span.instrumentation_scope.name)
    return found
