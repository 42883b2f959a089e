"""Foreign OpenTelemetry spans in rollouts."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from agl import emit_message, operation
from agl.schemas import Span
from agl.tracing import ActiveAttempt, OtelTracer, SpanRecorder, activate, current_span_id


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    tracer = OtelTracer()
    tracer.install()
    yield tracer
    tracer.uninstall()


@pytest.fixture
def recorder() -> SpanRecorder:
    return SpanRecorder()


def attempt(recorder: SpanRecorder, tracer: OtelTracer, number: int = 1) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id=f"ro-{number}",
        attempt_id=f"ro-{number}.1",
        trace_id=f"{number:032x}",
        root_span_id=f"{number:016x}",
        record=recorder.record,
        tracers=(tracer,),
    )


def foreign() -> trace.Tracer:
    return trace.get_tracer("some.framework")


def by_name(recorder: SpanRecorder) -> dict[str, Span]:
    return {span.name: span for span in recorder.drain()}


def test_spans_join_the_rollouts_tree(tracer: OtelTracer, recorder: SpanRecorder):
    with activate(attempt(recorder, tracer)), foreign().start_as_current_span("invoke_agent writer") as outer:
        outer.set_attribute("gen_ai.agent.name", "writer")
        outer.set_attribute("gen_ai.response.finish_reasons", ["stop"])
        outer.add_event("thought", {"words": 3})
        with foreign().start_as_current_span("execute_tool search", kind=trace.SpanKind.CLIENT) as tool:
            tool.set_status(Status(StatusCode.ERROR, "not found"))
    spans = by_name(recorder)
    agent, tool_span = spans["invoke_agent writer"], spans["execute_tool search"]
    assert (f"{1:016x}", f"{1:032x}", "ro-1") == (agent.parent_id, agent.trace_id, agent.rollout_id)
    assert agent.span_id == tool_span.parent_id
    assert {
        "gen_ai.agent.name": "writer",
        "gen_ai.response.finish_reasons": ["stop"],
        "otel.scope.name": "some.framework",
    } == agent.attributes
    assert [("thought", {"words": 3})] == [(event.name, event.attributes) for event in agent.events]
    assert ("client", "error", "not found") == (tool_span.kind, tool_span.status, tool_span.status_message)
    assert agent.start_ns <= tool_span.start_ns <= tool_span.end_ns <= agent.end_ns


def test_many_attributes_survive(tracer: OtelTracer, recorder: SpanRecorder):
    with activate(attempt(recorder, tracer)), foreign().start_as_current_span("wide") as span:
        for number in range(300):
            span.set_attribute(f"key.{number}", number)
    assert len(by_name(recorder)["wide"].attributes) == 301


def test_exceptions_are_kept_and_pass_through(tracer: OtelTracer, recorder: SpanRecorder):
    with (
        activate(attempt(recorder, tracer)),
        pytest.raises(ValueError, match="bad"),
        foreign().start_as_current_span("failing"),
    ):
        raise ValueError("bad")
    span = by_name(recorder)["failing"]
    assert ("error", "exception") == (span.status, span.events[0].name)


def test_operations_and_foreign_spans_nest_in_each_other(tracer: OtelTracer, recorder: SpanRecorder):
    with (
        activate(attempt(recorder, tracer)),
        operation("op outer"),
        foreign().start_as_current_span("foreign outer"),
    ):
        emit_message("one")
        with operation("op inner"), foreign().start_as_current_span("foreign inner"):
            emit_message("two")
    spans = recorder.drain()
    names = {span.span_id: span.name for span in spans}
    assert {
        ("message", "foreign outer"),
        ("message", "foreign inner"),
        ("foreign inner", "op inner"),
        ("op inner", "foreign outer"),
        ("foreign outer", "op outer"),
        ("op outer", None),
    } == {(span.name, names.get(span.parent_id or "")) for span in spans}


def test_the_current_span_is_opentelemetrys_own_and_never_a_strangers(tracer: OtelTracer, recorder: SpanRecorder):
    assert tracer.current_span_id() is None
    with foreign().start_as_current_span("outside"):
        assert tracer.current_span_id() is None
    with activate(attempt(recorder, tracer)):
        assert tracer.current_span_id() is None
        with foreign().start_as_current_span("inside") as span:
            expected = f"{span.get_span_context().span_id:016x}"
            assert expected == tracer.current_span_id() == current_span_id()


def test_a_span_belongs_to_the_rollout_in_which_it_started(tracer: OtelTracer, recorder: SpanRecorder):
    other = SpanRecorder()
    with foreign().start_as_current_span("before"), activate(attempt(recorder, tracer, 1)):
        started = foreign().start_span("started in one")
        with activate(attempt(other, tracer, 2)):
            started.end()
    assert ["started in one"] == [span.name for span in recorder.drain()]
    assert other.drain() == []


def test_concurrent_rollouts_keep_their_spans_apart(tracer: OtelTracer):
    recorders = [SpanRecorder() for _ in range(8)]

    async def rollout(number: int) -> None:
        mine = attempt(recorders[number], tracer, number + 1)
        with activate(mine), foreign().start_as_current_span(f"agent {number}"):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(lambda: foreign().start_span(f"tool {number}").end())

    async def run() -> None:
        await asyncio.gather(*(rollout(number) for number in range(8)))

    asyncio.run(run())
    for number, recorder in enumerate(recorders):
        spans = by_name(recorder)
        assert {f"agent {number}", f"tool {number}"} == set(spans)
        assert spans[f"agent {number}"].span_id == spans[f"tool {number}"].parent_id
        assert {f"{number + 1:032x}"} == {span.trace_id for span in spans.values()}


def test_a_span_left_open_is_recorded_when_the_attempt_ends(tracer: OtelTracer, recorder: SpanRecorder):
    with activate(attempt(recorder, tracer)):
        left = foreign().start_span("left open")
    span = by_name(recorder)["left open"]
    assert ("error", "still open when the attempt ended") == (span.status, span.status_message)
    left.end()
    assert recorder.drain() == []


def test_nothing_is_taken_outside_rollouts_or_after_uninstall(tracer: OtelTracer, recorder: SpanRecorder):
    foreign().start_span("outside").end()
    tracer.uninstall()
    with activate(attempt(recorder, tracer)), foreign().start_as_current_span("late"):
        assert tracer.current_span_id() is None
    assert recorder.drain() == []


def test_install_is_idempotent_and_tracers_do_not_duplicate_spans(tracer: OtelTracer, recorder: SpanRecorder):
    tracer.install()
    second = OtelTracer()
    second.install()
    with activate(attempt(recorder, tracer)):
        foreign().start_span("once").end()
    second.uninstall()
    with activate(attempt(recorder, tracer)):
        foreign().start_span("still on").end()
    assert ["once", "still on"] == [span.name for span in recorder.drain()]


def test_credentials_in_attributes_are_hidden(tracer: OtelTracer, recorder: SpanRecorder):
    with activate(attempt(recorder, tracer)), foreign().start_as_current_span("call") as span:
        span.set_attribute("http.request.header.authorization", "Bearer sk-provider-0123456789")
    assert "sk-provider" not in repr(recorder.drain())


def test_a_failure_of_the_processor_stays_out_of_the_agent(
    tracer: OtelTracer, recorder: SpanRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with activate(attempt(recorder, tracer)):
        for name in ("agl.tracing._otel._parent_of", "agl.tracing._otel._close"):
            with monkeypatch.context() as patch:
                patch.setattr(name, broken)
                foreign().start_span("x").end()
    assert ["still open when the attempt ended"] == [span.status_message for span in recorder.drain()]
    assert [ZeroDivisionError, ZeroDivisionError] == [entry.exc_info[0] for entry in caplog.records if entry.exc_info]


def test_a_users_provider_is_joined_and_never_replaced():
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl.tracing import OtelTracer
early = trace.get_tracer("made before any provider")
exporter, provider, recorder = InMemorySpanExporter(), TracerProvider(), SpanRecorder()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = OtelTracer()
tracer.install()
assert trace.get_tracer_provider() is provider
attempt = ActiveAttempt(
    rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id="1" * 16, record=recorder.record
)
with activate(attempt):
    early.start_span("both").end()
tracer.uninstall()
early.start_span("theirs").end()
assert [span.name for span in recorder.drain()] == ["both"]
assert [span.name for span in exporter.get_finished_spans()] == ["both", "theirs"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
