"""LangChain and LangGraph: what the tracer adds to a model call. No figures where they are not installed."""

from importlib.util import find_spec
from itertools import repeat

from benchmarks._adapters import overhead
from benchmarks._harness import Figure, component, table

_CALLS = 200
_FOUND = all(map(find_spec, ("langchain_core", "langgraph", "agl_langchain")))


def figures(*, repeats: int) -> list[Figure]:
    """A chain and a graph whose node calls the model."""
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langgraph.graph import START, MessagesState, StateGraph

    model = GenericFakeChatModel(messages=repeat(AIMessage("done")))
    chain = ChatPromptTemplate.from_template("{text}") | model | StrOutputParser()
    builder = StateGraph(MessagesState)
    builder.add_node("write", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "write")
    graph = builder.compile()

    def chains() -> int:
        for _ in range(_CALLS):
            chain.invoke({"text": "x " * 500})
        return _CALLS

    def graphs() -> int:
        for _ in range(_CALLS):
            graph.invoke({"messages": [("user", "x " * 500)]})
        return _CALLS

    return [
        overhead("LangChain tracer per call, a chain", component("tracer", "langchain"), chains, repeats=repeats),
        overhead("LangChain tracer per call, a graph", component("tracer", "langchain"), graphs, repeats=repeats),
    ]


def run(*, quick: bool) -> list[Figure]:
    """The figures, or none."""
    return figures(repeats=3 if quick else 9) if _FOUND else []


if __name__ == "__main__":
    print(table(run(quick=False)))
