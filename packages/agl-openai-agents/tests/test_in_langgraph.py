"""A LangGraph node that runs an agent of the OpenAI Agents SDK, whose tool runs a chain: one tree, every call in place.

Runs where both frameworks are installed.
"""

from typing import Any

import pytest

pytest.importorskip("agl_langchain", reason="agl-langchain is not installed")
pytest.importorskip("langgraph", reason="langgraph is not installed")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from agents import Agent, Runner, function_tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from agl_langchain.tracer import LangChainTracer
from agl_openai_agents.tracer import OpenAIAgentsTracer
from agl_testing.model_server import ScriptedModelServer
from tests.tool_model import check, play

from . import programs
from .test_matrix import client_of


async def solve(task: Any, llm: Any) -> None:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key or "none")

    @function_tool
    async def draft(question: str) -> str:
        """Draft with a chain."""
        return str((await model.with_config(run_name="drafter").ainvoke(question)).content)

    async def research(state: MessagesState) -> dict[str, Any]:
        async with client_of(llm) as client:
            agent = Agent(name="helper", model=programs.model_of(client), tools=[draft])
            await Runner.run(agent, task["question"])
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("research", research)
    builder.add_edge(START, "research")
    await builder.compile(name="team").ainvoke({"messages": [("user", task["question"])]})


@pytest.mark.parametrize("gateway", [False, True], ids=["wire", "gateway"])
@pytest.mark.parametrize("is_langchain_first", [True, False])
def test_two_frameworks_give_one_tree(is_langchain_first: bool, gateway: bool, server: ScriptedModelServer):
    tracers = [LangChainTracer(), OpenAIAgentsTracer()]
    played = play(solve, server, *(tracers if is_langchain_first else reversed(tracers)), count=8, gateway=gateway)
    assert [None] * 8 == [run.attempt.error for run in played]
    check(played, server)
    for run in played:
        assert [
            ("helper", "team/research/helper"),
            ("helper", "team/research/helper"),
            ("helper", "team/research/helper/draft"),
            ("research", "team/research"),
        ] == run.who
