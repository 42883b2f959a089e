"""The tracer reports hand-offs and tools, and changes nothing else."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import (
    OpenAIProvider,
    RunConfig,
    Runner,
    TracingProcessor,
    custom_span,
    function_span,
    set_trace_processors,
    set_tracing_disabled,
    trace,
)
from agents.tracing import get_trace_provider

import agl
from agl.tracing import ActiveAttempt, activate, current_span_id
from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import check, play

from . import programs
from .test_matrix import client_of, program

MODULE = """
from agents import Agent, Runner, set_tracing_disabled

set_tracing_disabled({is_disabled})
AGENT = Agent(name="early")


async def solve(task, config):
    await Runner.run(AGENT, task["question"], run_config=config)
"""


class Watching(TracingProcessor):
    """A program's own trace processor, which collects the traces and spans that it receives."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_trace_start(self, trace: Any) -> None:
        self.events.append(f"start {trace.name}")

    def on_trace_end(self, trace: Any) -> None:
        self.events.append(f"end {trace.name}")

    def on_span_start(self, span: Any) -> None:
        self.events.append(f"start {span.span_data.type}")

    def on_span_end(self, span: Any) -> None:
        self.events.append(f"end {span.span_data.type}")

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def force_flush(self) -> None:
        self.events.append("flush")


@pytest.fixture(autouse=True)
def watching() -> Any:
    """Install the program's processor instead of the SDK's exporter."""
    processor = Watching()
    set_trace_processors([processor])
    yield processor
    set_trace_processors([])
    get_trace_provider()._manual_disabled = None  # type: ignore[attr-defined]


def there() -> tuple[Any, ...]:
    return tuple(get_trace_provider()._multi_processor._processors)  # type: ignore[attr-defined]


def observe(work: Any, tracer: OpenAIAgentsTracer) -> list[agl.Span]:
    """Return the spans of ``work`` in an attempt; the tracer must already be installed."""
    spans: list[agl.Span] = []
    capture = ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=spans.append,
        tracers=(tracer,),
    )
    with activate(capture):
        work()
    return spans


def work() -> None:
    with trace("workflow"), function_span("tool"):
        pass


def test_the_programs_processors_see_what_happens_outside_rollouts_only(watching: Watching, tracer: OpenAIAgentsTracer):
    tracer.install()
    try:
        assert ["execute_tool tool", "invoke_workflow workflow"] == [span.name for span in observe(work, tracer)]
        assert [] == watching.events
        work()
        assert ["start workflow", "start function", "end function", "end workflow"] == watching.events
    finally:
        tracer.uninstall()
    assert (watching,) == there()


def test_tracers_installed_at_once_know_their_spans_and_leave_when_the_last_one_does(watching: Watching):
    tracers = [OpenAIAgentsTracer(), OpenAIAgentsTracer()]
    seen: list[str | None] = []

    def look() -> None:
        with trace("workflow"), function_span("tool"):
            seen.append(current_span_id())

    for tracer in tracers:
        tracer.install()
    spans = [observe(look, tracer)[0] for tracer in (*tracers, tracers[0])]
    tracers[0].uninstall()
    spans += observe(look, tracers[1])[:1]
    work()
    tracers[1].uninstall()
    assert seen == [span.span_id for span in spans]
    assert ["start workflow", "start function", "end function", "end workflow"] == watching.events
    assert (watching,) == there()


def test_workflows_at_once_that_share_the_id_of_a_trace_keep_apart(tracer: OpenAIAgentsTracer):
    async def run(name: str) -> None:
        with trace(name, trace_id=f"trace_{'1' * 32}"), function_span(name):
            await asyncio.sleep(0.01)

    async def work() -> None:
        await asyncio.gather(run("one"), run("two"), run("three"))

    tracer.install()
    try:
        spans = observe(lambda: asyncio.run(work()), tracer)
    finally:
        tracer.uninstall()
    names = {span.span_id: span.name for span in spans}
    tools = [span for span in spans if span.name.startswith("execute_tool")]
    assert 3 == len(tools)
    for span in tools:
        assert span.name.removeprefix("execute_tool") == names[str(span.parent_id)].removeprefix("invoke_workflow")
    assert {"ok"} == {span.status for span in spans}


def test_processors_that_the_program_adds_or_sets_later_do_not_take_the_tracers_place(
    watching: Watching, tracer: OpenAIAgentsTracer
):
    added, replaced = Watching(), Watching()
    tracer.install()
    try:
        get_trace_provider().register_processor(added)
        assert 2 == len(observe(work, tracer))
        assert [] == [*added.events, *watching.events]
        set_trace_processors([replaced])
        assert 2 == len(observe(work, tracer))
        assert [] == replaced.events
    finally:
        tracer.uninstall()
    assert (replaced,) == there()


@pytest.mark.parametrize("is_disabled_before", [True, False])
def test_a_program_that_turns_tracing_off_is_observed_and_keeps_its_choice(
    is_disabled_before: bool, watching: Watching, tracer: OpenAIAgentsTracer
):
    if is_disabled_before:
        set_tracing_disabled(True)
    tracer.install()
    try:
        if not is_disabled_before:
            set_tracing_disabled(True)
        assert 2 == len(observe(work, tracer))
        work()
        assert [] == watching.events
    finally:
        tracer.uninstall()
    work()
    assert [] == watching.events


@pytest.mark.parametrize("is_disabled", [True, False])
@pytest.mark.parametrize("is_imported_before", [True, False])
def test_agents_built_at_import_are_traced_whenever_that_was(
    is_imported_before: bool,
    is_disabled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: ScriptedModelServer,
    tracer: OpenAIAgentsTracer,
):
    """An agent for which no API was chosen uses the API that can be trained."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "early_agent", raising=False)
    (tmp_path / "early_agent.py").write_text(MODULE.format(is_disabled=is_disabled), encoding="utf-8")
    if is_imported_before:
        importlib.import_module("early_agent")
    else:
        tracer.install()
        importlib.import_module("early_agent")

    async def solve(task: Any, llm: Any) -> None:
        async with client_of(llm) as client:
            config = RunConfig(model="scripted", model_provider=OpenAIProvider(openai_client=client))
            await sys.modules["early_agent"].solve(task, config)

    played = play(solve, server, tracer, count=3)
    check(played, server)
    assert [[("early", "early")]] * 3 == [run.who for run in played]
    assert {"chat"} == {span.call.dialect for run in played for span in run.calls}
    monkeypatch.delitem(sys.modules, "early_agent")


def test_the_default_api_is_given_back(server: ScriptedModelServer, tracer: OpenAIAgentsTracer):
    from agents.models import _openai_shared

    async def agent(task: Any, llm: Any) -> None:
        assert not _openai_shared.get_use_responses_by_default()

    (run,) = play(agent, server, tracer)
    assert (None, True) == (run.attempt.error, _openai_shared.get_use_responses_by_default())


def test_a_hand_off_is_recorded_with_both_ends_and_is_no_error(server: ScriptedModelServer, tracer: OpenAIAgentsTracer):
    (run,) = play(program(lambda client, question: Runner.run(programs.triage(client), question)), server, tracer)
    (handed,) = run.named("handoff writer")
    assert ("triage", "writer") == (
        handed.attributes["agl.handoff.source"],
        handed.attributes["agl.handoff.target"],
    )
    assert {"ok"} == {span.status for span in run.spans}


def test_a_tool_that_fails_is_an_error_even_where_the_model_is_told(
    server: ScriptedModelServer, tracer: OpenAIAgentsTracer
):
    agent = program(lambda client, question: Runner.run(programs.helper(client, tools=[programs.handled]), question))
    (run,) = play(agent, server, tracer)
    (tool,), (agent,) = run.named("execute_tool handled"), run.named("invoke_agent helper")
    assert (None, "error") == (run.attempt.error, tool.status)
    assert "handled" == tool.attributes["gen_ai.tool.name"]
    assert "question" in tool.attributes["gen_ai.tool.call.arguments"]
    assert "ok" == agent.status


def test_operations_and_spans_nest_in_each_other(tracer: OpenAIAgentsTracer):
    def nested() -> None:
        outer, between = agl.operation("outer"), agl.operation("between")
        with outer, trace("workflow"), custom_span("step"), between, function_span("tool"):
            pass

    tracer.install()
    try:
        spans = {span.name: span for span in observe(nested, tracer)}
    finally:
        tracer.uninstall()
    chain = [spans[name] for name in ("outer", "invoke_workflow workflow", "step", "between", "execute_tool tool")]
    assert [span.span_id for span in chain[:-1]] == [span.parent_id for span in chain[1:]]


def test_an_exception_that_was_handled_before_marks_nothing(tracer: OpenAIAgentsTracer):
    def after_an_error() -> None:
        try:
            raise ValueError("handled")
        except ValueError:
            work()

    tracer.install()
    try:
        assert {"ok"} == {span.status for span in observe(after_an_error, tracer)}
    finally:
        tracer.uninstall()


def test_a_span_that_is_never_finished_is_closed_with_its_attempt(tracer: OpenAIAgentsTracer):
    def leave_open() -> None:
        trace("workflow").start()

    tracer.install()
    try:
        (span,) = observe(leave_open, tracer)
    finally:
        tracer.uninstall()
    assert ("error", True) == (span.status, "still open" in span.status_message)


def test_the_sdk_is_not_imported_before_install():
    code = (
        "import sys, agl_openai_agents.plugin, agl_openai_agents.tracer as module\n"
        "module.OpenAIAgentsTracer()\n"
        "print('agents' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False" == done.stdout.strip()
