"""The tracer passes the tests for all tracers, and restores AutoGen."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import BaseAgent, CancellationToken
from autogen_core._telemetry import TraceHelper
from autogen_core.tools import BaseStreamTool, BaseTool, FunctionTool
from autogen_ext.models.replay import ReplayChatCompletionClient

from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl_autogen.tracer import AutoGenTracer
from agl_testing.conformance.tracer import Probe, TracerConformance, TracerScenario

PATCHED: tuple[tuple[object, str], ...] = (
    (TraceHelper, "trace_block"),
    (BaseGroupChat, "run_stream"),
    (BaseChatAgent, "run_stream"),
    (AssistantAgent, "on_messages"),
    (AssistantAgent, "on_messages_stream"),
    (BaseAgent, "on_message"),
    (BaseAgent, "publish_message"),
    (BaseTool, "run_json"),
    (BaseStreamTool, "run_json_stream"),
)


def tool_of(function: Any) -> FunctionTool:
    return FunctionTool(function, description="", name="look")


async def use(function: Any) -> None:
    """Run an agent's turn, and then one of its tools."""
    agent = AssistantAgent("calc", model_client=ReplayChatCompletionClient(["hi"]))
    await agent.run(task="hello")
    await tool_of(function).run_json({}, CancellationToken())


async def look(probe: Probe) -> None:
    async def work() -> str:
        probe()
        return "seen"

    await use(work)


async def fail(error: Exception) -> None:
    async def work() -> str:
        raise error

    await use(work)


class TestAutoGenTracer(TracerConformance):
    @pytest.fixture
    def scenario(self) -> TracerScenario:
        return TracerScenario(tracer=AutoGenTracer(), run=look, fail=fail, patched=PATCHED)


def attempt(recorder: SpanRecorder, tracer: AutoGenTracer) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        tracers=(tracer,),
    )


def test_process_is_patched_until_the_last_tracer_is_uninstalled() -> None:
    original = BaseTool.run_json
    first, second = AutoGenTracer(), AutoGenTracer()
    first.install()
    second.install()
    first.uninstall()
    assert original is not BaseTool.run_json
    second.uninstall()
    assert original is BaseTool.run_json


def test_tool_with_a_result_that_cannot_be_described_still_answers(caplog: pytest.LogCaptureFixture) -> None:
    class Unspeakable(FunctionTool):
        def return_value_as_string(self, value: Any) -> str:
            raise ValueError("unspeakable")

    async def work() -> str:
        return "seen"

    tracer, recorder = AutoGenTracer(), SpanRecorder()
    tracer.install()
    with activate(attempt(recorder, tracer)), pytest.raises(ValueError, match="unspeakable"):
        asyncio.run(Unspeakable(work, description="", name="look").run_json({}, CancellationToken()))
    tracer.uninstall()
    assert ["execute_tool look"] == [span.name for span in recorder.drain()]
    assert "could not be recorded" in caplog.text


ORDER = """
import asyncio, importlib, json, sys
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl_autogen.tracer import AutoGenTracer

tracer, recorder = AutoGenTracer(), SpanRecorder()
assert "autogen_core" not in sys.modules, "the framework is imported on install only"
if sys.argv[1] == "agent first":
    team = importlib.import_module("team_agent").team
tracer.install()
if sys.argv[1] == "tracer first":
    team = importlib.import_module("team_agent").team
capture = ActiveAttempt(rollout_id="r", attempt_id="r.1", trace_id="1" * 32, root_span_id="1" * 16,
                  record=recorder.record, tracers=(tracer,))
with activate(capture):
    asyncio.run(team.run(task="go"))
spans = recorder.drain()
names = {span.span_id: span.name for span in spans}
print(json.dumps(sorted([span.name, names.get(span.parent_id, "")] for span in spans if "create" not in span.name)))
"""

TEAM = """
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.replay import ReplayChatCompletionClient

members = [AssistantAgent(name, model_client=ReplayChatCompletionClient(["hi"])) for name in ("red", "green")]
team = RoundRobinGroupChat(members, max_turns=2)
"""


@pytest.mark.parametrize("order", ["agent first", "tracer first"])
def test_order_of_imports_does_not_matter(order: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team that was built before the tracer's installation traces its runtime; those spans are left out."""
    monkeypatch.delenv("AUTOGEN_DISABLE_RUNTIME_TRACING")
    (tmp_path / "team_agent.py").write_text(TEAM)
    command = [sys.executable, "-c", ORDER, order]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    team = "invoke_workflow RoundRobinGroupChat"
    past = [["chat", f"invoke_agent {name}"] for name in ("green", "red")]  # its replay client calls no model
    expected = [*past, ["invoke_agent green", team], ["invoke_agent red", team], [team, ""]]
    assert str(expected).replace("'", '"') == done.stdout.strip()
