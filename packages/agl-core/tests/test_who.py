"""``who`` names the caller of a model during a run; the recorded spans give the same answer afterwards."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace

from agl import operation, semconv
from agl.contracts import Tracer
from agl.episodes import Enclosing
from agl.tracing import ActiveAttempt, OtelTracer, SpanRecorder, Who, activate, open_span, who

NAMES = st.sampled_from(["write", "check", "solver", "search"])
KEYS = st.sampled_from([semconv.AGENT_NAME, semconv.NODE, semconv.ROLE, semconv.TOOL_NAME, semconv.WORKFLOW_NAME])


def attempt_to(recorder: SpanRecorder, **fields: object) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        **fields,  # type: ignore[arg-type]
    )


def test_who_is_nobody_outside_a_rollout_and_at_its_root():
    assert Who() == who()
    with activate(attempt_to(SpanRecorder())):
        assert Who() == who()


def test_who_names_the_operation_and_the_agent_around_the_running_code():
    with activate(attempt_to(SpanRecorder())):
        with operation("draft", **{semconv.AGENT_NAME: "writer"}), operation("look up"):
            assert ("writer", ("writer", "draft", "look up")) == (who().agent, who().inside)
        assert "" == who().agent


def test_who_forgets_an_operation_that_raised():
    with activate(attempt_to(SpanRecorder())) as attempt:
        with pytest.raises(KeyError), operation("draft"):
            raise KeyError("draft")
        assert Who() == who()
        assert 0 == len(attempt.spans)


def test_who_reads_the_spans_of_opentelemetry_as_they_are_now():
    tracer = OtelTracer()
    tracer.install()
    framework = trace.get_tracer("framework")
    with activate(attempt_to(SpanRecorder(), tracers=(tracer,))) as attempt:
        with framework.start_as_current_span("invoke_agent", attributes={semconv.AGENT_NAME: "critic"}) as span:
            assert "critic" == who().agent
            span.set_attribute(semconv.AGENT_NAME, "judge")
            assert "judge" == who().agent
        assert 0 == len(attempt.spans)
    tracer.uninstall()


class Slow(Tracer):
    """A tracer that learns of an agent only when it is flushed.

    ``inner`` is a span inside that agent which the tracer names before.
    """

    def __init__(self, inner: str = "") -> None:
        self.span_id = "5" * 16
        self.inner = inner

    def install(self) -> None: ...

    def uninstall(self) -> None: ...

    def current_span_id(self) -> str:
        return self.inner or self.span_id

    def flush(self, timeout_s: float) -> None:
        open_span(agent="late", span_id=self.span_id, is_current=False)


def test_who_waits_for_a_tracer_that_hears_of_events_later():
    with activate(attempt_to(SpanRecorder(), tracers=(Slow(),))):
        assert "late" == who().agent


def test_who_waits_for_an_enclosing_span_whose_event_comes_after_that_of_the_inner_one():
    slow = Slow(inner="6" * 16)
    with activate(attempt_to(SpanRecorder(), tracers=(slow,))):
        open_span(model="m", span_id=slow.inner, parent=slow.span_id, is_current=False)
        assert "late" == who().agent


def test_who_survives_a_span_that_cannot_be_described(caplog: pytest.LogCaptureFixture):
    with activate(attempt_to(SpanRecorder())), open_span("draft", agent="writer", attributes=lambda: 1 / 0):  # type: ignore[arg-type,return-value]
        assert "writer" == who().agent
    assert "could not be read" in caplog.text


def test_who_follows_a_span_into_the_threads_that_start_in_it():
    seen: list[str] = []
    with activate(attempt_to(SpanRecorder())), open_span(agent="writer"):
        thread = threading.Thread(target=lambda: seen.append(who().agent))
        thread.start()
        thread.join()
    assert ["writer"] == seen


@given(st.lists(st.tuples(NAMES, st.dictionaries(KEYS, NAMES, max_size=2)), min_size=1, max_size=6))
def test_who_agrees_with_the_recorded_spans(levels: list[tuple[str, dict[str, str]]]):
    recorder = SpanRecorder()
    with activate(attempt_to(recorder)):
        operations = [operation(name, **attributes) for name, attributes in levels]
        for each in operations:
            each.__enter__()
        seen, innermost = who(), operations[-1].span_id
        for each in reversed(operations):
            each.__exit__(None, None, None)
    spans = {span.span_id: span for span in recorder.drain()}
    assert Enclosing(list(spans.values())).who(spans[innermost or ""]) == seen
