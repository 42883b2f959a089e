"""AutoGen agents as people write them; this module knows nothing of the tracer."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Handoff, TaskResult
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool
from autogen_core import (
    AgentId,
    CancellationToken,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from agl.schemas import LLM

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)


@asynccontextmanager
async def model_of(llm: LLM) -> AsyncGenerator[OpenAIChatCompletionClient]:
    settings: Any = {"model": llm.model, "base_url": llm.base_url, "api_key": llm.api_key or "none"}
    client = OpenAIChatCompletionClient(**settings, model_info=INFO)
    try:
        yield client
    finally:
        await client.close()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


async def run_one(task: Any, llm: LLM, **options: Any) -> str:
    async with model_of(llm) as model:
        agent = AssistantAgent("calc", model_client=model, **options)
        result = await agent.run(task=task["marker"])
        return text_of(result)


def text_of(result: TaskResult) -> str:
    return result.messages[-1].to_text()  # type: ignore[union-attr]


async def plain(task: Any, llm: LLM) -> str:
    return await run_one(task, llm)


def blocking(task: Any, llm: LLM) -> str:
    return asyncio.run(run_one(task, llm))


async def with_tools(task: Any, llm: LLM) -> str:
    return await run_one(task, llm, tools=[add, divide], reflect_on_tool_use=True)


async def streaming(task: Any, llm: LLM) -> str:
    async with model_of(llm) as model:
        agent = AssistantAgent(
            "calc", model_client=model, model_client_stream=True, tools=[add], reflect_on_tool_use=True
        )
        last = ""
        async for item in agent.run_stream(task=task["marker"]):
            if isinstance(item, TaskResult):
                last = text_of(item)
        return last


async def asked_directly(task: Any, llm: LLM) -> str:
    """Run turns without an enclosing run; one of the turns is streamed."""
    async with model_of(llm) as model:
        calc, check = (AssistantAgent(name, model_client=model) for name in ("calc", "check"))
        question = TextMessage(content=task["marker"], source="user")
        await calc.on_messages([question], CancellationToken())
        return "".join([str(item) async for item in check.on_messages_stream([question], CancellationToken())])


async def read_in_between(task: Any, llm: LLM) -> str:
    """Ask another agent in the middle of reading an agent's stream."""
    async with model_of(llm) as model:
        calc, check = (AssistantAgent(name, model_client=model) for name in ("calc", "check"))
        said = ""
        async for item in calc.run_stream(task=task["marker"]):
            if isinstance(item, TextMessage) and item.source == "calc":
                said = text_of(await check.run(task=f"{task['marker']} {item.content}"))
        return said


async def handing_off(task: Any, llm: LLM) -> str:
    async with model_of(llm) as model:
        triage = AssistantAgent("triage", model_client=model, handoffs=[Handoff(target="writer", name="go_on")])
        writer = AssistantAgent("writer", model_client=model)
        team = Swarm([triage, writer], termination_condition=TextMentionTermination("DONE"))
        result = await team.run(task=task["marker"])
        return text_of(result)


async def agent_as_tool(task: Any, llm: LLM) -> str:
    async with model_of(llm) as model:
        helper = AgentTool(AssistantAgent("helper", model_client=model, description="Helps."))
        return await run_one(task, llm, tools=[helper], reflect_on_tool_use=True)


async def selecting(task: Any, llm: LLM) -> str:
    async with model_of(llm) as model:
        members = [AssistantAgent(name, model_client=model, description=name) for name in ("red", "green")]
        done = TextMentionTermination("DONE", sources=["red", "green"])
        team = SelectorGroupChat(members, model_client=model, termination_condition=done)
        result = await team.run(task=task["marker"])
        return text_of(result)


async def model_call_in_a_tool(task: Any, llm: LLM) -> str:
    def ask(question: str) -> str:
        """Ask the model in a thread of AutoGen's executor."""
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as asked:
            messages: Any = [{"role": "user", "content": f"{task['marker']} {question}"}]
            answer = asked.chat.completions.create(model=llm.model, messages=messages)
        return answer.choices[0].message.content or ""

    return await run_one(task, llm, tools=[ask], reflect_on_tool_use=True)


async def team_in_a_team(task: Any, llm: LLM) -> str:
    """Run two named teams, one of which is a member of the other."""
    async with model_of(llm) as model:
        red, green = (AssistantAgent(name, model_client=model, description=name) for name in ("red", "green"))
        desk = RoundRobinGroupChat([red], name="desk", max_turns=1)
        office = RoundRobinGroupChat([desk, green], name="office", max_turns=2)
        return text_of(await office.run(task=task["marker"]))


@dataclass
class Question:
    text: str


class Thinker(RoutedAgent):
    def __init__(self, llm: LLM) -> None:
        super().__init__("A thinker.")
        self._llm = llm

    @message_handler
    async def think(self, message: Question, ctx: MessageContext) -> str:
        async with model_of(self._llm) as model:
            answer = await model.create([UserMessage(content=message.text, source="user")])
        return str(answer.content)


async def on_the_core_alone(task: Any, llm: LLM) -> str:
    runtime = SingleThreadedAgentRuntime()
    await Thinker.register(runtime, "thinker", lambda: Thinker(llm))
    runtime.start()
    answer = await runtime.send_message(Question(task["marker"]), AgentId("thinker", "default"))
    await runtime.stop_when_idle()
    return str(answer)


class StoppedError(Exception):
    """Raised by the agent itself."""


async def raising(task: Any, llm: LLM) -> str:
    await run_one(task, llm)
    raise StoppedError(task["marker"])
