"""Ordinary programs of the OpenAI Agents SDK; they know nothing of rollouts."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, Tool, function_tool, trace
from openai import AsyncOpenAI


def model_of(client: AsyncOpenAI, *, api: str = "chat") -> Any:
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    return kind(model="scripted", openai_client=client)


@function_tool
def weather(question: str) -> str:
    """The weather."""
    return f"sunny {question}"


@function_tool(failure_error_function=None)
def broken(question: str) -> str:
    """A tool that fails."""
    raise LookupError(f"no such city {question}")


@function_tool
def handled(question: str) -> str:
    """A tool that fails, which the model is told."""
    raise LookupError(f"no such city {question}")


def thinking_tools(client: AsyncOpenAI) -> list[Tool]:
    """Two tools that call the model themselves."""

    async def ask(question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(model="scripted", messages=messages)
        return str(answer.choices[0].message.content)

    @function_tool
    async def search(question: str) -> str:
        """Search."""
        return await ask(question)

    @function_tool
    async def lookup(question: str) -> str:
        """Look up."""
        return await ask(question)

    return [search, lookup]


def helper(client: AsyncOpenAI, *, tools: Any = (), api: str = "chat") -> Agent[Any]:
    return Agent(name="helper", model=model_of(client, api=api), tools=list(tools))


def triage(client: AsyncOpenAI) -> Agent[Any]:
    """An agent that hands off to another."""
    writer = Agent(name="writer", model=model_of(client))
    return Agent(name="triage", model=model_of(client), handoffs=[writer])


def boss(client: AsyncOpenAI) -> Agent[Any]:
    """An agent with another agent as its tool."""
    expert = Agent(name="expert", model=model_of(client))
    consult = expert.as_tool(tool_name="consult", tool_description="Ask the expert.")
    return Agent(name="boss", model=model_of(client), tools=[consult])


async def traced(agent: Agent[Any], question: str) -> None:
    """Run an agent in a trace that the program named."""
    with trace("joke"):
        await Runner.run(agent, question)


async def stream(agent: Agent[Any], question: str) -> None:
    result = Runner.run_streamed(agent, question)
    events = [event async for event in result.stream_events()]
    assert events


def in_threads(make_agent: Callable[[], Agent[Any]], question: str) -> None:
    """Run the agent in a new thread, and in an executor that the program creates."""

    def work() -> None:
        Runner.run_sync(make_agent(), question)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
