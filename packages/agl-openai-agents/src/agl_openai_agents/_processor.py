"""The trace processor: inside rollouts the SDK's spans become ours, outside they go where they went before."""

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from agents.tracing import Span, Trace, TracingProcessor, get_current_span, get_current_trace

from agl.tracing import Capture, current, innermost
from agl_openai_agents._convert import Open, open_, span_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)


class RolloutProcessor(TracingProcessor):
    """Takes the spans that start inside a rollout; ``others`` get all the rest.

    Nothing of ours is raised: the SDK calls it inside the agent's own run.

    Attributes:
        others: The processors that were there before.
        is_on: Whether rollouts are observed.
        is_forwarding: Whether the others get what happens outside rollouts; not where tracing was turned off.
    """

    def __init__(self) -> None:
        self.others: Sequence[TracingProcessor] = ()
        self.is_on = True
        self.is_forwarding = True
        self._open: dict[str, Open] = {}

    def current_open(self) -> Open | None:
        """The innermost span of this context, or its trace, that belongs to the current attempt."""
        capture = current()
        if capture is None:
            return None
        span, trace = get_current_span(), get_current_trace()
        for key in (span.span_id if span else "", trace.trace_id if trace else ""):
            opened = self._open.get(key)
            if opened is not None and opened.capture is capture:
                return opened
        return None

    def on_trace_start(self, trace: Trace) -> None:
        """A workflow began."""
        capture = current()
        if capture is None or not self.is_on:
            self._tell("on_trace_start", trace)
        else:
            self._start(trace.trace_id, trace, capture)

    def on_trace_end(self, trace: Trace) -> None:
        """A workflow ended."""
        if not self._end(trace.trace_id):
            self._tell("on_trace_end", trace)

    def on_span_start(self, span: Span[Any]) -> None:
        """An agent, a model call, a tool, a hand-off or a part of one began."""
        capture = current()
        if capture is None or not self.is_on:
            self._tell("on_span_start", span)
        else:
            self._start(span.span_id, span, capture)

    def on_span_end(self, span: Span[Any]) -> None:
        """It ended."""
        if not self._end(span.span_id):
            self._tell("on_span_end", span)

    def shutdown(self) -> None:
        """Shut the others down."""
        self._tell("shutdown")

    def force_flush(self) -> None:
        """Flush the others."""
        self._tell("force_flush")

    def _tell(self, event: str, *values: Any) -> None:
        for other in self.others if self.is_forwarding else ():
            getattr(other, event)(*values)

    def _start(self, key: str, source: Any, capture: Capture) -> None:
        try:
            opened = open_(source, capture, parent_id=self._parent_of(source, capture))
            self._open[key] = opened
            capture.closers[id(opened)] = lambda: self._close(key)
            if opened.is_recorded:
                capture.starts[opened.span_id] = time.perf_counter_ns()
                capture.opened[opened.span_id] = lambda: span_of(opened, is_ended=False)
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("The start of a span of the Agents SDK could not be observed.")

    def _parent_of(self, source: Any, capture: Capture) -> str:
        """The SDK's parent, unless something that the SDK does not know was opened within it."""
        above = getattr(source, "parent_id", None) or (source.trace_id if hasattr(source, "span_data") else "")
        parent = self._open.get(above)
        if parent is None or parent.capture is not capture:
            return innermost(capture)
        here = self.current_open()
        return innermost(capture) if here is not None and here.span_id == parent.span_id else parent.span_id

    def _end(self, key: str) -> bool:
        """Record what ended; returns whether it was ours."""
        opened = self._open.pop(key, None)
        if opened is None:
            return False
        opened.capture.closers.pop(id(opened), None)
        if opened.is_recorded:
            opened.capture.starts.pop(opened.span_id, None)
            opened.capture.opened.pop(opened.span_id, None)
            self._record(opened, is_ended=True)
        return True

    def _close(self, key: str) -> None:
        """The attempt ends first."""
        opened = self._open.pop(key, None)
        if opened is not None and opened.is_recorded:
            self._record(opened, is_ended=False)

    def _record(self, opened: Open, *, is_ended: bool) -> None:
        raised = sys.exception()
        try:
            own = None if raised is opened.raised else raised
            opened.capture.record(span_of(opened, raised=own, is_ended=is_ended))
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("A span of the Agents SDK could not be recorded.")
