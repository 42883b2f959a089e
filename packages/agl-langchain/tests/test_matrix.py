"""LangChain and LangGraph, used in every way, eight rollouts at once in one process, recorded in it and by the gateway.

| | LangChain | LangGraph |
|---|---|---|
| sync, async, stream, tool, parallel tools, thread | green | green |
| sub-agent | an agent as another's tool | agents as nodes, hand-off by ``Command`` |
| functional API | | entry point, tasks, tasks within tasks |
| retry after 429 and 500 | green | green |
| exception | of a tool | of a node |

No cell is impossible. Every test of :data:`CELLS` checks what :func:`rollouts.check` says: no call lost or attributed
to another rollout, token ids equal to the server's, one tree, no span left open.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from agl_langchain.tracer import LangChainTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import check, play

from . import agents
from .agents import asked

COUNT = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A way to use a framework: the agent, the (agent, path) of its calls, and additional text for the task."""

    agent: Callable[[Any, Any], Any]
    who: list[tuple[str, str]]
    task: str = ""
    errors: int = 0
    is_streamed: bool = False


def chain_sync(task: Any, llm: Any) -> None:
    agents.chain(llm).invoke(task)


async def chain_async(task: Any, llm: Any) -> None:
    await agents.chain(llm).ainvoke(task)


def chain_stream(task: Any, llm: Any) -> None:
    assert len(list(agents.chain(llm).stream(task))) > 1


async def chain_stream_async(task: Any, llm: Any) -> None:
    assert len([part async for part in agents.chain(llm).astream(task)]) > 1


def chain_threads(task: Any, llm: Any) -> None:
    assert len(agents.in_threads(agents.chain(llm).invoke, task)) == 2


def tool(task: Any, llm: Any) -> None:
    agents.agent(llm, [agents.weather]).invoke(asked(task))


async def parallel_tools(task: Any, llm: Any) -> None:
    await agents.agent(llm, agents.thinking_tools(llm)).ainvoke(asked(task))


def sub_agent(task: Any, llm: Any) -> None:
    agents.supervisor(llm).invoke(asked(task))


def graph_sync(task: Any, llm: Any) -> None:
    agents.graph(llm).invoke(asked(task))


async def graph_async(task: Any, llm: Any) -> None:
    await agents.graph(llm).ainvoke(asked(task))


def graph_stream(task: Any, llm: Any) -> None:
    assert list(agents.graph(llm).stream(asked(task), stream_mode="messages"))


async def graph_stream_async(task: Any, llm: Any) -> None:
    assert [part async for part in agents.graph(llm).astream(asked(task), stream_mode="messages")]


def graph_threads(task: Any, llm: Any) -> None:
    assert len(agents.in_threads(agents.graph(llm).invoke, asked(task))) == 2


def graph_tool(task: Any, llm: Any) -> None:
    agents.in_graph(agents.agent(llm, [agents.weather], name=None), "solve").invoke(asked(task))


async def graph_parallel_tools(task: Any, llm: Any) -> None:
    await agents.in_graph(agents.agent(llm, agents.thinking_tools(llm)), "solve").ainvoke(asked(task))


def hand_off(task: Any, llm: Any) -> None:
    agents.swarm(llm).invoke(asked(task))


def flow_sync(task: Any, llm: Any) -> None:
    agents.flow(llm).invoke(asked(task)["messages"])


async def flow_async(task: Any, llm: Any) -> None:
    await agents.flow_async(llm).ainvoke(asked(task)["messages"])


CHAIN = [("writer", "writer")]
GRAPH = [("plan", "team/plan"), ("write", "team/write")]
FLOW = [("draft", "flow/draft"), ("check", "flow/check")]
TOOLS = [("helper", "helper/tools/lookup"), ("helper", "helper/tools/search")]
MODEL = ("helper", "helper/model")
FAILS = "fail twice"

CELLS = {
    "langchain sync": Cell(agent=chain_sync, who=CHAIN),
    "langchain async": Cell(agent=chain_async, who=CHAIN),
    "langchain stream": Cell(agent=chain_stream, who=CHAIN, is_streamed=True),
    "langchain stream async": Cell(agent=chain_stream_async, who=CHAIN, is_streamed=True),
    "langchain tool": Cell(agent=tool, who=[MODEL, MODEL]),
    "langchain parallel tools": Cell(agent=parallel_tools, who=[MODEL, MODEL, *TOOLS]),
    "langchain sub-agent": Cell(
        agent=sub_agent,
        who=[("boss", "boss/model")] * 2 + [("expert", "boss/tools/consult/expert/model")] * 2,
    ),
    "langchain retry": Cell(agent=chain_sync, who=CHAIN, task=FAILS, errors=2),
    "langchain retry in a stream": Cell(agent=chain_stream, who=CHAIN, task=FAILS, errors=2, is_streamed=True),
    "langchain thread": Cell(agent=chain_threads, who=CHAIN * 2),
    "langgraph sync": Cell(agent=graph_sync, who=GRAPH),
    "langgraph async": Cell(agent=graph_async, who=GRAPH),
    "langgraph stream": Cell(agent=graph_stream, who=GRAPH, is_streamed=True),
    "langgraph stream async": Cell(agent=graph_stream_async, who=GRAPH, is_streamed=True),
    "langgraph tool": Cell(agent=graph_tool, who=[("solve", "solve")] * 2),
    "langgraph parallel tools": Cell(
        agent=graph_parallel_tools,
        who=[("helper", f"solve/{path}") for _, path in (MODEL, MODEL, *TOOLS)],
    ),
    "langgraph hand-off": Cell(
        agent=hand_off,
        who=[("triage", "swarm/triage/triage/model"), ("writer", "swarm/writer/writer/model")],
    ),
    "langgraph functional": Cell(agent=flow_sync, who=FLOW),
    "langgraph functional async": Cell(agent=flow_async, who=[("agent", "flow/agent"), ("model", "flow/agent/model")]),
    "langgraph retry": Cell(agent=graph_async, who=GRAPH, task=FAILS, errors=2),
    "langgraph thread": Cell(agent=graph_threads, who=GRAPH * 2),
}


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_every_call_is_recorded_where_it_was_made(
    cell: Cell, gateway: bool, server: ScriptedModelServer, tracer: LangChainTracer
):
    played = play(cell.agent, server, tracer, count=COUNT, gateway=gateway, task=cell.task)
    assert [None] * COUNT == [run.attempt.error for run in played]
    check(played, server, errors=cell.errors)
    for run in played:
        assert sorted(cell.who) == run.who
        assert {cell.is_streamed} == {span.call.is_streamed for span in run.calls}
        assert cell.errors == sum(bool(t.reject) for t in run.episode.transitions)
        assert {"ok"} == {span.status for span in run.spans if span.call is None}


def broken_tool(task: Any, llm: Any) -> None:
    agents.agent(llm, [agents.broken]).invoke(asked(task))


async def broken_tool_async(task: Any, llm: Any) -> None:
    await agents.agent(llm, [agents.broken]).ainvoke(asked(task))


def broken_node(task: Any, llm: Any) -> None:
    agents.failing_graph(llm).invoke(asked(task))


def refused(task: Any, llm: Any) -> None:
    agents.chain(llm).invoke(task)


FAILURES = {
    "tool": (broken_tool, "", "no such city broken {mark}", ["execute_tool broken", "invoke_node tools"], 0),
    "tool async": (broken_tool_async, "", "no such city broken {mark}", ["execute_tool broken"], 0),
    "node": (broken_node, "", "lost answer to {mark}", ["invoke_node write", "invoke_agent team"], 0),
    "model": (refused, "refuse", "Error code: 400", ["chat scripted", "invoke_workflow writer"], 1),
}


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_exceptions_pass_through_and_mark_what_they_passed(
    case: Any, gateway: bool, server: ScriptedModelServer, tracer: LangChainTracer
):
    agent, task, message, names, errors = case
    played = play(agent, server, tracer, count=COUNT, gateway=gateway, task=task)
    check(played, server, errors=errors)
    for run in played:
        assert run.attempt.error is not None
        assert message.format(mark=run.rollout.task["mark"]) in run.attempt.error.message
        failed = {span.name for span in run.spans if span.status == "error" and span.call is None}
        assert {"rollout"} <= failed
        assert {name for name in names if name.startswith(("execute", "chat", "invoke_node"))} <= failed


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_agent_sees_its_own_exception(is_traced: bool, server: ScriptedModelServer, tracer: LangChainTracer):
    raised = LookupError("mine")
    seen: list[BaseException] = []

    def fails(_: Any) -> None:
        raise raised

    def agent(task: Any, llm: Any) -> None:
        try:
            RunnableLambda(fails).invoke(task)
        except LookupError as error:
            seen.append(error)

    if is_traced:
        play(agent, server, tracer)
    else:
        agent({}, None)
    assert [True] == [error is raised for error in seen]
