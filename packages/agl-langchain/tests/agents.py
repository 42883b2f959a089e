"""Ordinary LangChain and LangGraph programs; they know nothing of rollouts."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command


def model_of(llm: Any) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key or "none")


def asked(task: Any) -> dict[str, Any]:
    return {"messages": [HumanMessage(task["question"])]}


def chain(llm: Any) -> Runnable[Any, Any]:
    """A plain LangChain chain with a name: a prompt, a model and a parser."""
    return (ChatPromptTemplate.from_template("{question}") | model_of(llm) | StrOutputParser()).with_config(
        run_name="writer"
    )


def graph(llm: Any) -> Any:
    """A plain LangGraph graph: two nodes that call the model."""
    model = model_of(llm)

    def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def plan_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("plan", RunnableLambda(plan, plan_async))
    builder.add_node("write", write)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "write")
    builder.add_edge("write", END)
    return builder.compile(name="team")


def flow(llm: Any) -> Any:
    """LangGraph's functional API: an entry point with two tasks, the second of which calls the model in a chain."""
    model = model_of(llm)

    @task
    def draft(messages: list[Any]) -> str:
        return str(model.invoke(messages).content)

    @task(name="check")
    def judge(text: str) -> str:
        return str((ChatPromptTemplate.from_template("{text}") | model).invoke({"text": text}).content)

    @entrypoint()
    def flow(messages: list[Any]) -> str:
        return judge(draft(messages).result()).result()

    return flow


def flow_async(llm: Any) -> Any:
    """The same flow with coroutines; one task calls another, and both have names of an agent's nodes."""
    model = model_of(llm)

    @task(name="model")
    async def ask(messages: list[Any]) -> str:
        return str((await model.ainvoke(messages)).content)

    @task
    async def agent(messages: list[Any]) -> str:
        await model.ainvoke(messages)
        return await ask(messages)

    @entrypoint()
    async def flow(messages: list[Any]) -> str:
        return await agent(messages)

    return flow


def thinking_tools(llm: Any) -> list[BaseTool]:
    """Two tools that call the model themselves."""
    model = model_of(llm)

    @tool
    def search(question: str) -> str:
        """Search."""
        return str(model.invoke(question).content)

    @tool
    async def lookup(question: str) -> str:
        """Look up."""
        return str((await model.ainvoke(question)).content)

    return [search, lookup]


@tool
def weather(question: str) -> str:
    """The weather."""
    return f"sunny {question}"


@tool
def broken(question: str) -> str:
    """A tool that fails."""
    raise LookupError(f"no such city {question}")


def in_graph(agent: Any, name: str) -> Any:
    """Put an agent into a larger graph as a node."""
    builder = StateGraph(MessagesState)
    builder.add_node(name, agent)
    builder.add_edge(START, name)
    builder.add_edge(name, END)
    return builder.compile()


def agent(llm: Any, tools: list[BaseTool], *, name: str | None = "helper") -> Any:
    return create_agent(model_of(llm), tools, name=name)


def swarm(llm: Any) -> Any:
    """A graph of two agents, the first of which hands off to the second."""

    @tool
    def transfer_to_writer(tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Hand off to the writer."""
        done = ToolMessage("transferred", tool_call_id=tool_call_id)
        return Command(goto="writer", graph=Command.PARENT, update={"messages": [done]})

    builder = StateGraph(MessagesState)
    builder.add_node("triage", agent(llm, [transfer_to_writer], name="triage"), destinations=("writer",))
    builder.add_node("writer", agent(llm, [], name="writer"))
    builder.add_edge(START, "triage")
    builder.add_edge("writer", END)
    return builder.compile(name="swarm")


def supervisor(llm: Any) -> Any:
    """An agent with another agent as its tool."""
    expert = agent(llm, [weather], name="expert")

    @tool
    def consult(input: str) -> str:
        """Ask the expert."""
        return str(expert.invoke({"messages": [HumanMessage(input)]})["messages"][-1].content)

    return agent(llm, [consult], name="boss")


def failing_graph(llm: Any) -> Any:
    """A graph whose node raises after the model call."""
    model = model_of(llm)

    def write(state: MessagesState) -> dict[str, Any]:
        raise LookupError(f"lost {model.invoke(state['messages']).content}")

    builder = StateGraph(MessagesState)
    builder.add_node("write", write)
    builder.add_edge(START, "write")
    return builder.compile(name="team")


def in_threads(work: Any, argument: Any) -> list[Any]:
    """Run work in a new thread, and in an executor that the agent creates."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work(argument)))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        results.append(pool.submit(work, argument).result())
    return results
