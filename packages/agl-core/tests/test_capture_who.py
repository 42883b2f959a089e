"""Who is about to call a model, asked while it happens: the same answer as the recorded spans give later."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from agl import semconv
from agl._who import Enclosing, Who
from agl.schemas import Span
from agl.schemas._ids import new_span_id
from agl.tracing import Capture, SpanRecorder, activate, who
from agl.tracing._operation import operation
from agl.tracing._otel import RolloutProcessor

NAMES = st.sampled_from(["write", "check", "solver", "search"])
KEYS = st.sampled_from([semconv.AGENT_NAME, semconv.NODE, semconv.ROLE, semconv.TOOL_NAME])


def capture_to(recorder: SpanRecorder, **fields: object) -> Capture:
    return Capture(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        **fields,  # type: ignore[arg-type]
    )


def test_who_is_nobody_outside_a_rollout_and_at_its_root():
    assert Who() == who()
    with activate(capture_to(SpanRecorder())):
        assert Who() == who()


def test_who_names_the_operation_and_the_agent_around_the_running_code():
    with activate(capture_to(SpanRecorder())):
        with operation("draft", **{semconv.AGENT_NAME: "writer"}), operation("look up"):
            assert ("writer", ("writer", "draft", "look up")) == (who().agent, who().inside)
        assert "" == who().agent


def test_who_forgets_an_operation_that_raised():
    with activate(capture_to(SpanRecorder())) as capture:
        with pytest.raises(KeyError), operation("draft"):
            raise KeyError("draft")
        assert Who() == who()
        assert {} == capture.opened


def test_who_reads_the_spans_of_opentelemetry():
    provider, processor = TracerProvider(), RolloutProcessor()
    processor.switch(1, is_on=True)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("framework")
    with activate(capture_to(SpanRecorder(), current_span_id=lambda: next(reversed(capture.opened), None))) as capture:
        with tracer.start_as_current_span("invoke_agent", attributes={semconv.AGENT_NAME: "critic"}):
            assert "critic" == who().agent
        assert {} == capture.opened


def test_who_waits_for_a_tracer_that_hears_of_events_later():
    span_id = new_span_id()

    class Slow:
        def flush(self, timeout_s: float) -> None:
            capture.opened[span_id] = lambda: named("late", span_id)

    capture = capture_to(SpanRecorder(), tracers=(Slow(),), current_span_id=lambda: span_id)
    with activate(capture):
        assert "late" == who().agent


def test_who_survives_a_span_that_cannot_be_described(caplog: pytest.LogCaptureFixture):
    span_id = new_span_id()
    capture = capture_to(SpanRecorder(), current_span_id=lambda: span_id)
    capture.opened[span_id] = lambda: 1 / 0  # type: ignore[assignment,return-value]
    with activate(capture):
        assert Who() == who()
    assert "could not be described" in caplog.text


@given(st.lists(st.tuples(NAMES, st.dictionaries(KEYS, NAMES, max_size=2)), min_size=1, max_size=6))
def test_who_agrees_with_the_recorded_spans(levels: list[tuple[str, dict[str, str]]]):
    recorder = SpanRecorder()
    with activate(capture_to(recorder)):
        operations = [operation(name, **attributes) for name, attributes in levels]
        for each in operations:
            each.__enter__()
        seen, innermost = who(), operations[-1].span_id
        for each in reversed(operations):
            each.__exit__(None, None, None)
    spans = {span.span_id: span for span in recorder.drain()}
    assert Enclosing(list(spans.values())).who(spans[innermost or ""]) == seen


def named(name: str, span_id: str) -> Span:
    return Span(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        span_id=span_id,
        name=f"invoke_agent {name}",
        parent_id="1" * 16,
        attributes={semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: name},
    )
