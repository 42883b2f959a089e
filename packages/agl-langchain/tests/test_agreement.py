"""A chat model that bypasses the wire hook: the run reports its class, and does not train on the other calls."""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from agl_inspect.rollouts.explanations import explain
from agl_langchain.tracer import LangChainTracer
from agl_testing.model_server import Reply, ScriptedModelServer
from tests.tool_model import play


class ChatPigeon(BaseChatModel):
    """A chat model that answers without HTTP."""

    @property
    def _llm_type(self) -> str:
        return "pigeon"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("coo"))])


@pytest.fixture
def server():
    with ScriptedModelServer(respond=lambda request: Reply(text="well")) as server:
        yield server


def graph(writer: BaseChatModel, checker: BaseChatModel) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("write", lambda state: {"messages": [writer.invoke(state["messages"])]})
    builder.add_node("check", lambda state: {"messages": [checker.invoke(state["messages"])]})
    builder.add_edge(START, "write")
    builder.add_edge("write", "check")
    builder.add_edge("check", END)
    return builder.compile()


def half_seen(task: Any, llm: Any) -> None:
    seen = ChatOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "k", model=llm.model)
    graph(seen, ChatPigeon()).invoke({"messages": [("user", str(task["question"]))]})


@pytest.mark.parametrize("gateway", [False, True], ids=["in process", "gateway"])
def test_a_client_past_the_wire_is_named_and_nothing_of_the_rollout_trains(server, gateway):
    (run,) = play(half_seen, server, LangChainTracer(), gateway=gateway)
    (lost,) = run.episode.unseen
    assert "check" == lost.agent
    assert lost.client.endswith("ChatPigeon")
    assert ["unseen_calls"] == [call.reject for call in run.episode.transitions]
    assert () == run.episode.rows
    assert any("ChatPigeon" in line for line in explain(run.episode, run.spans))
