"""The tracer reports names, hand-offs, interrupts, tools and streams, and changes nothing else."""

import importlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from langsmith import utils

import agl
from agl import semconv
from agl.episodes import build_episode
from agl.tracing import ActiveAttempt, activate, current_span_id
from agl_langchain.tracer import LangChainTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import check, play

from . import agents
from .agents import asked

MODULE = """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

MODEL = ChatOpenAI(model="scripted", api_key="none")
AGENT = create_agent(MODEL, [], name="early")


def solve(task):
    return AGENT.invoke({"messages": [("user", task["question"])]})["messages"][-1].text
"""


def attempt_into(spans: list[agl.Span], tracer: LangChainTracer) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=spans.append,
        tracers=(tracer,),
    )


def observe(work: Any, tracer: LangChainTracer) -> list[agl.Span]:
    """Install the tracer, call ``work``, and return the spans."""
    spans: list[agl.Span] = []
    tracer.install()
    try:
        with activate(attempt_into(spans, tracer)):
            work()
    finally:
        tracer.uninstall()
    return spans


def only(spans: list[agl.Span], name: str) -> agl.Span:
    (found,) = [span for span in spans if span.name == name]
    return found


@pytest.mark.parametrize("is_imported_before", [True, False])
def test_agents_built_at_import_are_traced_whenever_that_was(
    is_imported_before: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: ScriptedModelServer,
    tracer: LangChainTracer,
):
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "early_agent.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "early_agent", raising=False)
    if is_imported_before:
        importlib.import_module("early_agent")

    def solve(task: Any) -> Any:
        return importlib.import_module("early_agent").solve(task)

    played = play(solve, server, tracer, count=3)
    check(played, server)
    assert [[("early", "early/model")]] * 3 == [run.who for run in played]
    monkeypatch.delitem(sys.modules, "early_agent")


@pytest.mark.parametrize("match", ["^helper$", "search", "helper|nobody"])
def test_agent_match_selects_by_the_names_in_the_code(match: str, server: ScriptedModelServer, tracer: LangChainTracer):
    async def agent(task: Any, llm: Any) -> None:
        await agents.agent(llm, agents.thinking_tools(llm)).ainvoke(asked(task))

    (run,) = play(agent, server, tracer)
    episode = build_episode(run.episode.rollout, run.attempt, run.spans, agent_match=match)
    expected = ["search"] if match == "search" else ["lookup", "model", "model", "search"]
    assert expected == sorted(t.path[-1] for t in episode.transitions if not t.reject)


def test_a_hand_off_is_recorded_once_and_is_no_error(server: ScriptedModelServer, tracer: LangChainTracer):
    def agent(task: Any, llm: Any) -> None:
        agents.swarm(llm).invoke(asked(task))

    (run,) = play(agent, server, tracer)
    handed = [span for span in run.spans if "agl.handoff.target" in span.attributes]
    assert [("execute_tool transfer_to_writer", "triage", "writer")] == [
        (span.name, span.attributes["agl.handoff.source"], span.attributes["agl.handoff.target"]) for span in handed
    ]
    assert {"ok"} == {span.status for span in run.spans}


def test_an_interrupt_is_no_error(tracer: LangChainTracer):
    def ask(_: MessagesState) -> dict[str, Any]:
        interrupt("go on?")
        return {"messages": []}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    graph = builder.compile(name="asking", checkpointer=InMemorySaver())

    spans = observe(lambda: graph.invoke({"messages": []}, {"configurable": {"thread_id": "t-1"}}), tracer)
    assert "GraphInterrupt" == only(spans, "invoke_node ask").attributes["agl.interrupt"]
    assert "t-1" == only(spans, "invoke_workflow asking").attributes["gen_ai.conversation.id"]
    assert {"ok"} == {span.status for span in spans}


def test_tools_are_recorded_with_arguments_result_and_failure(tracer: LangChainTracer):
    @tool
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    @tool
    def soft(a: int) -> Any:
        """Fail without raising."""
        return ToolMessage(f"{a} is wrong", tool_call_id="call-2", status="error")

    def work() -> None:
        call = {"type": "tool_call", "args": {"a": 1, "b": 4}, "name": "divide", "id": "call-1"}
        divide.invoke(call)
        soft.invoke({"a": 7})
        with pytest.raises(ZeroDivisionError):
            divide.invoke({"a": 1, "b": 0})

    good, wrong, raised = observe(work, tracer)
    assert ("divide", {"a": 1, "b": 4}, "0.25", "ok") == (
        good.attributes["gen_ai.tool.name"],
        good.attributes["gen_ai.tool.call.arguments"],
        good.attributes["gen_ai.tool.call.result"],
        good.status,
    )
    assert ("error", "7 is wrong", "ToolError") == (wrong.status, wrong.status_message, wrong.attributes["error.type"])
    assert ("error", "ZeroDivisionError") == (raised.status, raised.attributes["error.type"])


def test_operations_and_runs_nest_in_each_other(tracer: LangChainTracer):
    def work() -> None:
        with agl.operation("outer"):
            RunnableLambda(inner).with_config(run_name="step").invoke("go")

    def inner(_: str) -> Any:
        with agl.operation("between"):
            return RunnableLambda(lambda text: text).with_config(run_name="leaf").invoke("x")

    spans = observe(work, tracer)
    chain = [only(spans, name) for name in ("outer", "invoke_workflow step", "between", "invoke_node leaf")]
    assert [span.span_id for span in chain[:-1]] == [span.parent_id for span in chain[1:]]


def test_a_stream_that_nobody_reads_to_its_end_leaves_no_span_open(tracer: LangChainTracer):
    model = GenericFakeChatModel(messages=iter([AIMessage("one two three four")]))
    streams: list[Any] = []

    def work() -> None:
        stream = (RunnableLambda(lambda text: text) | model).with_config(run_name="talk").stream("hi")
        next(stream)
        streams.append(stream)

    spans = observe(work, tracer)
    assert {"chat", "invoke_workflow talk"} == {span.name for span in spans}
    assert {"error"} == {span.status for span in spans}
    assert all("still open" in span.status_message for span in spans)
    streams[0].close()
    assert 2 == len(spans)


def test_a_stream_that_is_closed_early_is_no_error(tracer: LangChainTracer):
    model = GenericFakeChatModel(messages=iter([AIMessage("one two three four")]))

    def work() -> None:
        stream = model.stream("hi")
        next(stream)
        stream.close()

    assert ["ok"] == [span.status for span in observe(work, tracer)]


def test_the_handler_given_by_hand_records_nothing_twice(tracer: LangChainTracer):
    chain = RunnableLambda(lambda text: text).with_config(run_name="step")

    def work() -> None:
        chain.invoke("go", {"callbacks": [tracer.get_langchain_handler()]})

    assert ["invoke_workflow step"] == [span.name for span in observe(work, tracer)]


def test_tracers_installed_at_once_know_their_spans_and_leave_when_the_last_one_does():
    tracers = [LangChainTracer(), LangChainTracer()]
    seen: list[str | None] = []
    chain = RunnableLambda(lambda _: seen.append(current_span_id())).with_config(run_name="step")

    def run(tracer: LangChainTracer) -> list[agl.Span]:
        spans: list[agl.Span] = []
        with activate(attempt_into(spans, tracer)):
            chain.invoke("go")
        return spans

    for tracer in tracers:
        tracer.install()
    spans = [*run(tracers[0]), *run(tracers[1])]
    tracers[0].uninstall()
    spans += run(tracers[1])
    tracers[1].uninstall()
    assert seen == [span.span_id for span in spans]
    assert [] == run(tracers[1])


def test_a_lit_agent_finds_the_handler(server: ScriptedModelServer, tracer: LangChainTracer):
    class Solver(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: agl.Rollout) -> None:
            config = {"callbacks": [self.tracer.get_langchain_handler()]}
            agents.chain(resources["main_llm"]).invoke(task, config)
            with pytest.raises(AttributeError, match="no tracer of this run has 'get_other_handler'"):
                self.tracer.get_other_handler()

    (run,) = play(Solver(), server, tracer)
    assert run.attempt.error is None
    check([run], server)
    assert [("writer", "writer")] == run.who


def test_the_handler_alone_is_enough_where_the_tracer_is_not_installed(tracer: LangChainTracer):
    spans: list[agl.Span] = []
    chain = RunnableLambda(lambda text: text).with_config(run_name="step")
    with activate(attempt_into(spans, tracer)):
        chain.invoke("go")
        chain.invoke("go", {"callbacks": [tracer.get_langchain_handler()]})
    assert ["invoke_workflow step"] == [span.name for span in spans]


def test_uploads_to_langsmith_are_off_inside_rollouts_only(monkeypatch: pytest.MonkeyPatch, tracer: LangChainTracer):
    for name in ("LANGCHAIN_TRACING_V2", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANGSMITH_TRACING", "true")
    utils.get_env_var.cache_clear()
    seen: list[Any] = []
    observe(lambda: seen.append(utils.tracing_is_enabled()), tracer)
    assert [False, True] == [*seen, utils.tracing_is_enabled()]
    assert {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"} == tracer.worker_env()
    utils.get_env_var.cache_clear()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unreadable:
    @property
    def content(self) -> str:
        raise RuntimeError("no content")


def end_of_tool(output: Any, tracer: LangChainTracer) -> agl.Span:
    """Return the span of a tool that returns ``output``."""

    def work() -> None:
        run_id, handler = uuid4(), tracer.get_langchain_handler()
        handler.on_tool_start(None, "x", run_id=run_id, name="strange")
        handler.on_tool_end(output, run_id=run_id)

    (span,) = observe(work, tracer)
    return span


def test_an_event_that_cannot_be_observed_is_logged(caplog: pytest.LogCaptureFixture, tracer: LangChainTracer):
    with caplog.at_level(logging.ERROR):
        span = end_of_tool(Unreadable(), tracer)
    assert ("execute_tool strange", "unset") == (span.name, span.status)
    assert "strange" in caplog.text
    assert "no content" in caplog.text


def test_a_result_without_a_text_is_recorded_by_its_type(tracer: LangChainTracer):
    span = end_of_tool(Unprintable(), tracer)
    assert ("ok", "<Unprintable: its __str__ raised>") == (span.status, span.attributes[semconv.TOOL_RESULT])


def test_nothing_of_langchain_is_imported_before_install():
    code = (
        "import sys, agl_langchain.plugin, agl_langchain.tracer as module\n"
        "module.LangChainTracer()\n"
        "print('langchain_core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False" == done.stdout.strip()
