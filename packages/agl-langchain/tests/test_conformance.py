"""The tracer passes the tests for all tracers, with a chain, a graph, a tool and a model."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool
from langgraph.graph import START, MessagesState, StateGraph

from agl_langchain.tracer import LangChainTracer
from agl_testing.conformance.tracer import Probe, TracerConformance, TracerScenario


def as_chain(work: Callable[[], Any]) -> Any:
    return (RunnableLambda(lambda _: None) | RunnableLambda(lambda _: work())).with_config(run_name="chain")


def as_graph(work: Callable[[], Any]) -> Any:
    def node(_: MessagesState) -> dict[str, Any]:
        work()
        return {"messages": []}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return RunnableLambda(lambda _: {"messages": []}) | builder.compile(name="graph")


def as_tool(work: Callable[[], Any]) -> Any:
    def call() -> str:
        """Work."""
        work()
        return "done"

    return RunnableLambda(lambda _: {}) | StructuredTool.from_function(call, name="tool")


def as_model(work: Callable[[], Any]) -> Any:
    class Model(GenericFakeChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            work()
            return super()._generate(*args, **kwargs)

    return RunnableLambda(lambda _: "hi") | Model(messages=iter([AIMessage("hi")]))


MAKERS = {"chain": as_chain, "graph": as_graph, "tool": as_tool, "model": as_model}


class TestLangChainTracer(TracerConformance):
    @pytest.fixture(params=MAKERS)
    def scenario(self, request: pytest.FixtureRequest) -> TracerScenario:
        make = MAKERS[request.param]

        def run(probe: Probe) -> None:
            make(probe).invoke("go")

        def fail(error: Exception) -> None:
            def work() -> None:
                raise error

            make(work).invoke("go")

        return TracerScenario(tracer=LangChainTracer(), run=run, fail=fail)


class TestLangChainTracerAsync(TracerConformance):
    @pytest.fixture(params=MAKERS)
    def scenario(self, request: pytest.FixtureRequest) -> TracerScenario:
        make = MAKERS[request.param]

        async def run(probe: Probe) -> None:
            await make(probe).ainvoke("go")

        async def fail(error: Exception) -> None:
            def work() -> None:
                raise error

            await make(work).ainvoke("go")

        return TracerScenario(tracer=LangChainTracer(), run=run, fail=fail)
