"""The tracer passes the tests for all tracers, and restores CrewAI."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crewai import Agent, BaseLLM, Crew, Task
from crewai.events import crewai_event_bus
from crewai.events.types.tool_usage_events import ToolUsageFinishedEvent, ToolUsageStartedEvent
from crewai.flow.flow import Flow, start
from crewai.tools import tool

from agl import operation
from agl.tracing import ActiveAttempt, SpanRecorder, Who, activate, who
from agl_crewai.tracer import CrewAITracer
from agl_testing.conformance.tracer import Probe, TracerConformance, TracerScenario

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CrewAI's own, of its own parts


class Looking(Flow[Any]):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__(suppress_flow_events=False)
        self._look = look

    @start()
    def look(self) -> str:
        self._look()
        return "seen"


def look(probe: Probe) -> None:
    Looking(probe).kickoff()


def fail(error: Exception) -> None:
    def work() -> None:
        raise error

    Looking(work).kickoff()


PATCHED = ((Crew, "kickoff"), (Crew, "akickoff"), (Agent, "kickoff_async"), (Flow, "kickoff_async"))


class TestCrewAITracer(TracerConformance):
    @pytest.fixture
    def scenario(self) -> TracerScenario:
        return TracerScenario(tracer=CrewAITracer(), run=look, fail=fail, patched=PATCHED)


@pytest.fixture
def recorder() -> SpanRecorder:
    return SpanRecorder()


def attempt(recorder: SpanRecorder, *tracers: CrewAITracer) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        tracers=tracers,
    )


def handlers() -> list[Any]:
    buses = (crewai_event_bus._sync_handlers, crewai_event_bus._async_handlers)
    return [handler for bus in buses for found in bus.values() for handler in found]


def test_bus_and_environment_are_restored_by_the_last_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "perhaps")
    monkeypatch.delenv("CREWAI_TRACING_ENABLED")
    before = handlers()
    first, second = CrewAITracer(), CrewAITracer()
    first.install()
    second.install()
    first.uninstall()
    assert len(before) < len(handlers())
    assert ("true", "false") == (os.environ["CREWAI_DISABLE_TELEMETRY"], os.environ["CREWAI_TRACING_ENABLED"])
    second.uninstall()
    assert set(before) == set(handlers())
    assert ("perhaps", None) == (os.environ["CREWAI_DISABLE_TELEMETRY"], os.environ.get("CREWAI_TRACING_ENABLED"))


def test_two_tracers_record_once(recorder: SpanRecorder) -> None:
    tracers = (CrewAITracer(), CrewAITracer())
    for tracer in tracers:
        tracer.install()
    with activate(attempt(recorder, *tracers)):
        look(lambda: None)
    for tracer in tracers:
        tracer.uninstall()
    spans = recorder.drain()
    assert ["invoke_node look", "invoke_workflow Looking"] == sorted(span.name for span in spans)
    assert "OTEL_SDK_DISABLED" not in os.environ


def test_operations_and_flows_nest_in_each_other(recorder: SpanRecorder) -> None:
    tracer = CrewAITracer()
    tracer.install()

    def inside() -> None:
        with operation("inner"):
            Looking(lambda: None).kickoff()

    with activate(attempt(recorder, tracer)), operation("outer"):
        Looking(inside).kickoff()
    tracer.uninstall()
    spans = recorder.drain()
    found = {(span.name, next((p.name for p in spans if p.span_id == span.parent_id), "")) for span in spans}
    assert {
        ("outer", ""),
        ("invoke_workflow Looking", "outer"),
        ("invoke_node look", "invoke_workflow Looking"),
        ("inner", "invoke_node look"),
        ("invoke_workflow Looking", "inner"),
    } == found


def test_scope_that_crewai_never_ends_is_recorded_with_the_attempt(recorder: SpanRecorder) -> None:
    tracer = CrewAITracer()
    tracer.install()
    with activate(attempt(recorder, tracer)):
        crewai_event_bus.emit(None, ToolUsageStartedEvent(tool_name="search", tool_args={"q": "x"}))
    with activate(attempt(recorder, tracer)):
        assert tracer.current_span_id() is None, "the open scope ends with its attempt"
    tracer.uninstall()
    (span,) = recorder.drain()
    assert ("execute_tool search", "error", "CrewAI did not end it") == (span.name, span.status, span.status_message)


def test_tool_that_reports_a_failure_is_an_error(recorder: SpanRecorder) -> None:
    failure = pytest.importorskip("crewai.tools.tool_failure", reason="this CrewAI has no such failures").ToolFailure
    tracer = CrewAITracer()
    tracer.install()
    start = ToolUsageStartedEvent(tool_name="search", tool_args={"q": "x"})
    times = {"started_at": start.timestamp, "finished_at": start.timestamp}
    end = ToolUsageFinishedEvent(
        tool_name="search", tool_args={"q": "x"}, output="sorry", failure=failure(message="no index"), **times
    )
    with activate(attempt(recorder, tracer)):
        crewai_event_bus.emit(None, start)
        crewai_event_bus.emit(None, end)
    tracer.uninstall()
    (span,) = recorder.drain()
    assert ("error", "no index", "ToolFailure") == (span.status, span.status_message, span.attributes["error.type"])


class Saying(BaseLLM):
    """A model that returns the given texts, and whose API has no tool calls."""

    texts: list[str] = []
    wait_s: float = 0.0

    def call(self, *args: Any, **options: Any) -> str:
        return self.texts.pop(0)

    async def acall(self, *args: Any, **options: Any) -> str:
        await asyncio.sleep(self.wait_s)
        return self.texts.pop(0)

    def supports_function_calling(self) -> bool:
        return False


def crew_of(model: Saying, *tools: Any) -> Crew:
    writer = Agent(role="writer", goal="write", backstory="none", llm=model, tools=list(tools))
    letter = Task(name="letter", description="write", expected_output="text", agent=writer)
    return Crew(name="office", agents=[writer], tasks=[letter])


def test_tool_called_in_text_ends_whatever_its_name_looks_like(recorder: SpanRecorder) -> None:
    @tool("Search the Web")
    def search(question: str) -> str:
        """Search."""
        return f"nothing on {question}"

    action = 'Thought: look\nAction: Search the Web\nAction Input: {"question": "tides"}'
    model = Saying(model="saying", texts=[action, "Thought: done\nFinal Answer: none"])
    tracer = CrewAITracer()
    tracer.install()
    with activate(attempt(recorder, tracer)):
        crew_of(model, search).kickoff()
    tracer.uninstall()
    (span,) = [span for span in recorder.drain() if span.name.startswith("execute_tool")]
    assert ("execute_tool Search the Web", "ok") == (span.name, span.status)
    assert "nothing on tides" == span.attributes["gen_ai.tool.call.result"]


@pytest.mark.parametrize("texts", [["too late"], []], ids=["cancelled", "failed"])
def test_what_follows_a_crew_that_broke_off_is_not_within_it(recorder: SpanRecorder, texts: list[str]) -> None:
    async def work() -> list[Who]:
        inside = who()
        with contextlib.suppress(TimeoutError, IndexError):
            async with asyncio.timeout(1.0):
                await crew_of(Saying(model="saying", texts=texts, wait_s=60.0 if texts else 0.0)).akickoff()
        return [inside, who()]

    tracer = CrewAITracer()
    tracer.install()
    with activate(attempt(recorder, tracer)):
        assert [Who(), Who()] == asyncio.run(work())
    tracer.uninstall()
    assert "invoke_agent writer" in {span.name for span in recorder.drain()}


def test_end_that_arrives_before_its_start_is_kept(recorder: SpanRecorder) -> None:
    from agl_crewai.listener import Listener

    start = ToolUsageStartedEvent(tool_name="search", tool_args={})
    times = {"started_at": start.timestamp, "finished_at": start.timestamp}
    end = ToolUsageFinishedEvent(tool_name="search", tool_args={}, output="found", **times)
    end.started_event_id = start.event_id
    stranger = ToolUsageFinishedEvent(tool_name="other", tool_args={}, output="found", **times)
    stranger.started_event_id = start.event_id
    listener, capture = Listener(), attempt(recorder)
    with activate(capture):
        listener.handle(None, end)
        assert 0 == len(recorder)
        listener.handle(None, start)
        assert ["ok"] == [span.status for span in recorder.drain()]
        listener.handle(None, stranger)
        listener.handle(None, start)
        assert 0 == len(recorder), "another tool's end does not end it"
        listener.close(capture)
    assert ["error"] == [span.status for span in recorder.drain()]


ORDER = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
from agl import operation
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl_crewai.tracer import CrewAITracer

tracer, recorder = CrewAITracer(), SpanRecorder()
assert "crewai" not in sys.modules, "the framework is imported on install only"
if sys.argv[1] == "agent first":
    flow = importlib.import_module("flow_agent").flow
tracer.install()
if sys.argv[1] == "tracer first":
    flow = importlib.import_module("flow_agent").flow
capture = ActiveAttempt(rollout_id="r", attempt_id="r.1", trace_id="1" * 32, root_span_id="1" * 16,
                  record=recorder.record, tracers=(tracer,))
with activate(capture):
    flow.kickoff()
print(json.dumps(sorted(span.name for span in recorder.drain())))
"""

FLOW = """
from crewai.flow.flow import Flow, start

class Small(Flow):
    @start()
    def begin(self):
        return "done"

flow = Small()
"""


@pytest.mark.long
@pytest.mark.parametrize("order", ["agent first", "tracer first"])
def test_order_of_imports_does_not_matter(order: str, tmp_path: Path) -> None:
    (tmp_path / "flow_agent.py").write_text(FLOW)
    command = [sys.executable, "-c", ORDER, order]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert '["invoke_node begin", "invoke_workflow Small"]' == done.stdout.strip().splitlines()[-1]
