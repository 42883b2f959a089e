"""The trace processor: records the SDK's spans inside rollouts, and forwards others to the program's own processors.

The tracer changes process-wide settings of the SDK (its trace processors, the switch that disables tracing, the API of
the default model) and restores them. The SDK has only setters for these, so private fields are read here.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from agents import Model, set_default_openai_api, set_trace_processors, set_tracing_disabled
from agents.models import _openai_shared
from agents.tracing import (
    Span,
    Trace,
    TracingProcessor,
    get_current_span,
    get_current_trace,
    get_trace_provider,
)

from agl.tracing import (
    ActiveAttempt,
    OpenSpan,
    Undo,
    around_async,
    current,
    current_span_id,
    note_model_call,
    open_span,
    patch_subclasses,
    stepped,
)
from agl_openai_agents._convert import about, about_error, class_name, has_no_span, is_model_call, open_from

_log = logging.getLogger(__name__)

_DISABLED = "OPENAI_AGENTS_DISABLE_TRACING"


@dataclass(frozen=True, kw_only=True, eq=False)
class _StartedSpan:
    """A span or a trace of the SDK that has started.

    Attributes:
        attempt: The attempt in which it started.
        span: Our span for it; ``None`` if it is not recorded.
        span_id: Id of the span to which calls inside belong: our span for it, or the enclosing one.
        raised: The exception that was being handled at the start, and that is therefore not the span's own.
        trace_id: The id of a trace, which several traces may share; ``""`` for a span.
    """

    attempt: ActiveAttempt
    span: OpenSpan | None
    span_id: str
    raised: BaseException | None
    trace_id: str = ""


class AgentsProcessor(TracingProcessor):
    """Records the spans that start inside a rollout; forwards all other spans to ``others``.

    The processor's own failures are logged and never raised, because the SDK calls it inside the agent's own run.

    Attributes:
        others: The processors that were installed before.
        is_on: Whether rollouts are observed.
        is_forwarding: Whether ``others`` get spans from outside of rollouts; false if the program disabled tracing.
    """

    def __init__(self) -> None:
        self.others: Sequence[TracingProcessor] = ()
        self.is_on = True
        self.is_forwarding = True
        self._open: dict[str, _StartedSpan] = {}

    def current_started(self) -> _StartedSpan | None:
        """Return the innermost span of this context, or else its trace, if it belongs to the current attempt."""
        attempt = current()
        if attempt is None:
            return None
        span, trace = get_current_span(), get_current_trace()
        opened = self._open.get(span.span_id) if span else None
        if (opened is None or opened.attempt is not attempt) and trace is not None:
            opened = self._trace_of(trace.trace_id, attempt)
        return opened if opened is not None and opened.attempt is attempt else None

    def on_trace_start(self, trace: Trace) -> None:
        """Note that a workflow started."""
        attempt = current()
        if attempt is None or not self.is_on:
            self._forward("on_trace_start", trace)
        else:
            self._start(_key_of(trace), trace, attempt, trace_id=trace.trace_id)

    def on_trace_end(self, trace: Trace) -> None:
        """Note that a workflow ended."""
        if not self._end(_key_of(trace), trace):
            self._forward("on_trace_end", trace)

    def on_span_start(self, span: Span[Any]) -> None:
        """Note that an agent, a model call, a tool, a hand-off or a part of one started."""
        attempt = current()
        if attempt is None or not self.is_on:
            self._forward("on_span_start", span)
        else:
            self._start(span.span_id, span, attempt)

    def on_span_end(self, span: Span[Any]) -> None:
        """Note that an agent, a model call, a tool, a hand-off or a part of one ended."""
        if not self._end(span.span_id, span):
            self._forward("on_span_end", span)

    def shutdown(self) -> None:
        """Shut down the processors that were installed before this one."""
        self._forward("shutdown")

    def force_flush(self) -> None:
        """Flush the processors that were installed before this one."""
        self._forward("force_flush")

    def _forward(self, event: str, *values: Any) -> None:
        for other in self.others if self.is_forwarding else ():
            getattr(other, event)(*values)

    def forget(self, attempt: ActiveAttempt) -> None:
        """Forget the spans that an ended attempt left open."""
        for key, opened in tuple(self._open.items()):
            if opened.attempt is attempt:
                self._open.pop(key, None)

    def _start(self, key: str, source: Any, attempt: ActiveAttempt, *, trace_id: str = "") -> None:
        try:
            parent = self._parent_of(source, attempt)
            if is_model_call(source):
                note_model_call()
            if has_no_span(source):
                span, span_id = None, parent or current_span_id() or attempt.root_span_id
            else:
                span = open_from(source, attempt, parent)
                span_id = span.span_id
            self._open[key] = _StartedSpan(
                attempt=attempt, span=span, span_id=span_id, raised=sys.exception(), trace_id=trace_id
            )
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("The start of a span of the Agents SDK could not be observed.")

    def _parent_of(self, source: Any, attempt: ActiveAttempt) -> str | None:
        """Return the id of a span's parent in the SDK; ``None`` if the context may hold a nearer span.

        Such a nearer span is for example that of an operation.
        """
        above = getattr(source, "parent_id", None)
        parent = self._open.get(above) if above else None
        if not above and hasattr(source, "span_data"):
            parent = self._trace_of(source.trace_id, attempt)
        here = self.current_started()
        if parent is None or parent.attempt is not attempt or (here is not None and here.span_id == parent.span_id):
            return None
        return parent.span_id

    def _trace_of(self, trace_id: str, attempt: ActiveAttempt) -> _StartedSpan | None:
        """Return the trace with this id: this context's current trace, or else one of the attempt."""
        here = get_current_trace()
        found = self._open.get(_key_of(here)) if here is not None and here.trace_id == trace_id else None
        own = (each for each in self._open.values() if each.attempt is attempt and each.trace_id == trace_id)
        return found or next(own, None)

    def _end(self, key: str, source: Any) -> bool:
        """Close the span; return false if it did not start in a rollout."""
        opened, raised = self._open.pop(key, None), sys.exception()
        if opened is None:
            return False
        try:
            if opened.span is not None:
                error = about_error(source, None if raised is opened.raised else raised)
                opened.span.close(**error, **about(source))
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("The end of a span of the Agents SDK could not be observed.")
        return True


def _key_of(trace: Trace) -> str:
    """Return a key for the trace object, because a program may give one id to several traces at once."""
    return f"trace {id(trace)}"


class SdkSettings:
    """Changes the SDK's settings for one processor, and restores them."""

    def __init__(self, processor: AgentsProcessor) -> None:
        self._processor = processor
        self._flag: bool | None = None
        self._is_chat_forced = False

    def apply(self) -> None:
        """Install only this processor, which forwards to the others, and enable tracing; safe to repeat."""
        there = _processors()
        if there != (self._processor,):
            added = [item for item in there if item is not self._processor]
            kept = self._processor.others if self._processor in there else ()
            self._processor.others = (*kept, *added)
            set_trace_processors([self._processor])
        flag = _flag()
        if _is_disabled(flag):
            self._flag = flag
            self._processor.is_forwarding = False
            set_tracing_disabled(False)

    def prefer_chat_completions(self) -> None:
        """Use chat completions for models without an explicit API.

        The Responses API returns no log-probabilities for tool calls, so these could not be trained.
        """
        if not self._is_chat_forced and _openai_shared.get_use_responses_by_default():
            self._is_chat_forced = True
            set_default_openai_api("chat_completions")

    def restore(self) -> None:
        """Restore the SDK's settings; processors that the program has added since then stay installed."""
        added = [item for item in _processors() if item is not self._processor]
        self._processor.is_on = False
        set_trace_processors([*self._processor.others, *added])
        if not self._processor.is_forwarding:
            _restore_tracing(self._flag)
        if self._is_chat_forced:
            set_default_openai_api("responses")


def _processors() -> tuple[TracingProcessor, ...]:
    inner: Any = getattr(get_trace_provider(), "_multi_processor", None)
    return tuple(getattr(inner, "_processors", ()))


def _flag() -> bool | None:
    """Return true if the program disabled tracing, false if it enabled it; ``None`` if the environment decides."""
    return getattr(get_trace_provider(), "_manual_disabled", None)


def _is_disabled(flag: bool | None) -> bool:
    return os.environ.get(_DISABLED, "false").lower() in ("true", "1") if flag is None else flag


def _restore_tracing(flag: bool | None) -> None:
    if flag is None:
        provider: Any = get_trace_provider()
        provider._manual_disabled = None
    else:
        set_tracing_disabled(flag)


def watch_models() -> Undo:
    """Open spans for model calls that bypass the wire hook and for which the SDK makes no span.

    Each call of the SDK's own models is in a span of kind ``generation`` or ``response``, but a program's own class of
    ``Model`` need not make one. All such classes, including those defined later, are watched. A call that the wire
    hook saw, or that a span of the SDK reports, gets no span here. The returned function restores the originals.
    """
    watched = {"get_response": around_async(_open), "stream_response": _watched_stream}
    return patch_subclasses(Model, watched, besides="agents")


def _open(model: Model, *, is_current: bool = True) -> OpenSpan:
    name = str(getattr(model, "model", ""))
    return open_span(client=class_name(model), model=name, unless_called=True, is_current=is_current)


def _watched_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def stream_response(self: Model, *args: Any, **options: Any) -> Any:
        items = original(self, *args, **options)
        return items if current() is None else stepped(partial(_open, self, is_current=False), items)

    return stream_response
