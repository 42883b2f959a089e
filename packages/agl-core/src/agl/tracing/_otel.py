"""Records the spans of other OpenTelemetry instrumentation, each in the rollout in which it starts.

It covers every library that reports through the global tracer provider, without code for any of them. If the user has
set a provider, it is used and never replaced; its sampler decides which spans exist. Processors cannot be removed from
a provider, so after :meth:`OtelTracer.uninstall` the processor stays there and does nothing.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from agl import semconv
from agl.contracts import Tracer
from agl.hints import pip_install
from agl.schemas import SpanEvent
from agl.tracing._context import ActiveAttempt, current, innermost
from agl.tracing._open_span import OpenSpan, open_span
from agl.tracing._patches import Undo, around_attempts
from agl.tracing._span_values import plain

try:
    from opentelemetry import context, trace
    from opentelemetry.sdk import trace as sdk
except ModuleNotFoundError as error:
    raise ImportError(
        f"the tracer otel needs opentelemetry-sdk, which is not installed; run: {pip_install('agl-core[otel]')}"
    ) from error

_log = logging.getLogger(__name__)


class OtelProcessor(sdk.SpanProcessor):
    """Records the spans that start inside a rollout, when the span or the rollout ends."""

    def __init__(self) -> None:
        self._open: dict[str, OpenSpan] = {}
        self._attempts: set[ActiveAttempt] = set()

    def is_open(self, span_id: str) -> bool:
        """True if the span belongs to a rollout and has not ended."""
        return span_id in self._open

    def on_start(self, span: sdk.Span, parent_context: context.Context | None = None) -> None:
        """Remember the current rollout for the span, which may end in another context."""
        attempt = current()
        # Only attempts that began while the tracer was installed.
        if attempt is None or attempt not in self._attempts:
            return
        try:
            self._open[_id_of(span)] = _opened(span, attempt)
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The start of the OpenTelemetry span %r could not be observed.", span.name)

    def on_end(self, span: sdk.ReadableSpan) -> None:
        """Record the span in the rollout in which it started."""
        try:
            opened = self._open.pop(_id_of(span), None)
            if opened is not None:
                _close(opened, span)
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The OpenTelemetry span %r could not be recorded.", span.name)

    @contextmanager
    def watch(self, attempt: ActiveAttempt) -> Generator[None]:
        """Record the attempt's spans during a ``with`` block.

        OpenTelemetry's current span in the block is the attempt's root, so that new spans join the attempt's trace.
        """
        if attempt in self._attempts:
            yield
            return
        # So that OpenTelemetry's instrumentation makes children of the rollout, and not new traces.
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(_root_of(attempt))))
        self._attempts.add(attempt)
        try:
            yield
        finally:
            self._attempts.discard(attempt)
            context.detach(token)
            for span_id, opened in tuple(self._open.items()):
                if opened.attempt is attempt:  # the attempt records what it left open
                    self._open.pop(span_id, None)


# One processor for each provider, found again by later tracers; weak, so that a provider can go.
_PROCESSORS: WeakKeyDictionary[sdk.TracerProvider, OtelProcessor] = WeakKeyDictionary()


class OtelTracer(Tracer):
    """Records OpenTelemetry spans in rollouts; see the module."""

    def __init__(self) -> None:
        self._processor: OtelProcessor | None = None
        self._undo: Undo | None = None

    def install(self) -> None:
        """Add a processor to the global provider; set a provider if the process has none."""
        if self._undo is None:
            self._processor = _processor_of(_provider())
            self._undo = around_attempts(self._processor.watch)

    def uninstall(self) -> None:
        """Stop recording the spans of attempts that start from now on; the processor stays, as it cannot be removed."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def current_span_id(self) -> str | None:
        """Id of OpenTelemetry's current span; ``None`` if that span does not belong to a rollout."""
        found = trace.get_current_span().get_span_context()
        span_id = trace.format_span_id(found.span_id)
        return span_id if self._processor is not None and self._processor.is_open(span_id) else None


def _provider() -> sdk.TracerProvider:
    found = trace.get_tracer_provider()
    if isinstance(found, sdk.TracerProvider):
        return found
    # Without a limit: the default of 128 attributes drops the oldest first, which name the agent
    # and the model.
    made = sdk.TracerProvider(span_limits=sdk.SpanLimits(max_span_attributes=sdk.SpanLimits.UNSET))
    trace.set_tracer_provider(made)
    return made


def _processor_of(provider: sdk.TracerProvider) -> OtelProcessor:
    found = _PROCESSORS.get(provider)
    if found is None:
        found = _PROCESSORS[provider] = OtelProcessor()
        provider.add_span_processor(found)
    return found


def _root_of(attempt: ActiveAttempt) -> trace.SpanContext:
    return trace.SpanContext(
        trace_id=int(attempt.trace_id, 16),
        span_id=int(attempt.root_span_id, 16),
        is_remote=False,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )


def _opened(span: sdk.Span, attempt: ActiveAttempt) -> OpenSpan:
    found, scope = span.get_span_context(), span.instrumentation_scope
    library = {} if scope is None else {"otel.scope.name": scope.name}
    return open_span(
        span.name,
        attempt=attempt,
        parent=_parent_of(span, attempt),
        span_id=trace.format_span_id(found.span_id),
        trace_id=trace.format_trace_id(found.trace_id),
        kind=span.kind.name.lower(),  # pyright: ignore[reportArgumentType]  # the five names are agl's too
        attributes=lambda: {**library, **_actor(span), **(span.attributes or {})},
        is_current=False,
    )


def _actor(span: sdk.Span) -> dict[str, str]:
    """Translate OpenInference's actor of a span to standard attributes; empty for a span without such an actor."""
    about = span.attributes or {}
    match about.get("openinference.span.kind"):
        case "AGENT":
            name = about.get("agent.name") or about.get("graph.node.name") or span.name.removesuffix(".run")
            return {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: str(name)}
        case "LLM":
            return {semconv.OPERATION: semconv.OP_CHAT}  # a model's client names no actor
        case "CHAIN" if span.name.endswith(".__call__"):
            return {semconv.OPERATION: ""}  # DSPy's adapter, within the module that asks
        case _:
            return {}


def _parent_of(span: sdk.ReadableSpan, attempt: ActiveAttempt) -> str:
    """The id of the parent to record: the innermost span, unless OpenTelemetry's own parent is nearer or different."""
    parent_id = trace.format_span_id(span.parent.span_id) if span.parent else attempt.root_span_id
    here = trace.format_span_id(trace.get_current_span().get_span_context().span_id)
    # The program chose another parent than its current span; it knows why.
    if parent_id not in (here, attempt.root_span_id):
        return parent_id
    inner, parent = innermost(attempt), attempt.spans.get(parent_id)
    # OpenTelemetry's parent began after the innermost span of ours, so it is the nearer one.
    is_outside = parent is not None and (inner == attempt.root_span_id or attempt.spans.since(inner) < parent.since)
    return parent_id if is_outside else inner


def _close(opened: OpenSpan, span: sdk.ReadableSpan) -> None:
    opened.name = span.name
    events = tuple(
        SpanEvent(name=event.name, time_ns=event.timestamp, attributes=plain(dict(event.attributes or {})))
        for event in span.events
    )
    code, said = span.status.status_code, span.status.description or ""
    opened.close(
        said if code is trace.StatusCode.ERROR else None,
        status=code.name.lower(),  # pyright: ignore[reportArgumentType]  # the three names are agl's too
        end_ns=span.end_time,
        events=events,
    )


def _id_of(span: sdk.ReadableSpan) -> str:
    found = span.get_span_context()
    return trace.format_span_id(found.span_id) if found else ""
