"""LangGraph nodes as roles: a policy, or an algorithm's agents, are chosen by the names of nodes."""

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from agl.contracts import Upstream
from agl.episodes import build_episode
from agl.schemas import Claim, Episode, Rollout, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.embedded import EmbeddedGateway
from agl_langchain.tracer import LangChainTracer
from agl_run import AgentSpec, AsyncRunner, RunContext
from agl_testing.model_server import Reply, ScriptedModelServer

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def server():
    with ScriptedModelServer(respond=lambda request: Reply(text="well")) as server:
        yield server


async def team(task: Any) -> None:
    """Run nodes that call one model, and a node that is an agent with another name."""
    model = ChatOpenAI(model="gpt-5", base_url="http://127.0.0.1:9/v1", api_key="sk-own")
    editor = create_agent(model, tools=[], name="editor")
    builder = StateGraph(MessagesState)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    for name in ("write", "check", "rewrite"):
        builder.add_node(name, ask)
    builder.add_node("edit", editor)
    for first, second in (
        (START, "write"),
        ("write", "check"),
        ("check", "rewrite"),
        ("rewrite", "edit"),
        ("edit", END),
    ):
        builder.add_edge(first, second)
    await builder.compile(name="newsroom").ainvoke({"messages": [("user", "hi")]})


async def play(server: ScriptedModelServer, upstreams: list[Upstream]) -> tuple[Rollout, Any, list[Any]]:
    store, gateway = MemoryStore(), EmbeddedGateway()
    url = await gateway.start(store=store, upstreams=upstreams, secret=SECRET)

    async def resources(_: Rollout) -> dict[str, Any]:
        return {}

    setup = RunContext(
        agent=AgentSpec.of(team),
        store=store,
        secret=SECRET,
        resources=resources,
        gateway_url=url,
        gateway=gateway,
        upstreams=upstreams,
        tracers=[("langchain", LangChainTracer())],
    )
    runner = AsyncRunner(setup)
    await runner.start()
    rollout = Rollout(rollout_id=new_rollout_id(), task="hi")
    await store.enqueue([rollout])
    (claim,) = await store.claim(worker="test")
    outcome = await runner.execute(Claim(rollout=claim.rollout, attempt=claim.attempt))
    await gateway.settle(claim.attempt.attempt_id)
    await store.finish([outcome])
    await runner.stop()
    await gateway.stop()
    (attempt,) = await store.attempts(rollout.rollout_id)
    assert "succeeded" == attempt.status, attempt.error
    return rollout, attempt, await store.spans(rollout.rollout_id)


def test_nodes_and_agents_reach_the_policy_that_names_them_and_are_selected_by_name(server):
    def upstream(name: str, agents: str = "", **more: Any) -> Upstream:
        return Upstream(name=name, base_url=server.base_url, model=name, agents=agents, is_trained=True, **more)

    upstreams = [
        upstream("writer", "write|rewrite"),
        upstream("editing", "editor"),
        upstream("rest", aliases=("gpt-*",)),
    ]
    rollout, attempt, spans = asyncio.run(play(server, upstreams))
    whole = build_episode(rollout, attempt, spans)
    assert [("write", "writer"), ("check", "rest"), ("rewrite", "writer"), ("editor", "editing")] == [
        (call.agent, call.policy) for call in whole.transitions
    ]
    assert ((), ()) == (whole.unseen, whole.unattributed)

    def selected(pattern: str) -> list[str]:
        episode: Episode = build_episode(rollout, attempt, spans, agent_match=pattern)
        return [call.agent for call in episode.transitions if not call.reject]

    assert ["write", "rewrite"] == selected("write|rewrite")
    assert ["write"] == selected("^write$")
    assert ["editor"] == selected("editor")
    assert ["check"] == selected("check")
