"""CrewAI crews and flows as people write them; this module knows nothing of the tracer."""

from typing import Any

import crewai
import openai
from crewai import Agent, Crew, Process, Task
from crewai.flow.flow import Flow, listen, start
from crewai.tools import tool
from opentelemetry import trace

from agl.schemas import LLM


def model_of(llm: LLM, **options: Any) -> crewai.LLM:
    return crewai.LLM(
        model=llm.model, provider="openai", base_url=llm.base_url, api_key=llm.api_key or "none", **options
    )


def agent_of(role: str, llm: crewai.LLM, **options: Any) -> Agent:
    return Agent(role=role, goal=f"be a {role}", backstory="none", llm=llm, **options)


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("divide")
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


def crew_of(task: Any, llm: crewai.LLM, **options: Any) -> Crew:
    writer = agent_of("writer", llm, **options)
    return Crew(
        name="office",
        agents=[writer],
        tasks=[Task(name="letter", description=task["marker"], expected_output="text", agent=writer)],
    )


def blocking(task: Any, llm: LLM) -> str:
    return str(crew_of(task, model_of(llm)).kickoff())


async def in_a_thread(task: Any, llm: LLM) -> str:
    return str(await crew_of(task, model_of(llm)).kickoff_async())


async def natively_async(task: Any, llm: LLM) -> str:
    return str(await crew_of(task, model_of(llm)).akickoff())


def streaming(task: Any, llm: LLM) -> str:
    return str(crew_of(task, model_of(llm, stream=True), tools=[add]).kickoff())


def with_tools(task: Any, llm: LLM) -> str:
    return str(crew_of(task, model_of(llm), tools=[add, divide]).kickoff())


def delegating(task: Any, llm: LLM) -> str:
    model = model_of(llm)
    writer = agent_of("writer", model, allow_delegation=True)
    helper = agent_of("researcher", model)
    job = Task(name="letter", description=task["marker"], expected_output="text", agent=writer)
    return str(Crew(name="office", agents=[writer, helper], tasks=[job]).kickoff())


def in_sequence(task: Any, llm: LLM) -> str:
    model = model_of(llm)
    agents = [agent_of(role, model) for role in ("writer", "editor")]
    tasks = [
        Task(name=f"{agent.role} work", description=task["marker"], expected_output="text", agent=agent)
        for agent in agents
    ]
    return str(Crew(name="office", agents=agents, tasks=tasks, process=Process.sequential).kickoff())


def at_once(task: Any, llm: LLM) -> str:
    """Run two tasks in CrewAI's threads, and one that waits for both."""
    model = model_of(llm)
    agents = [agent_of(role, model) for role in ("red", "green", "last")]
    tasks = [
        Task(
            name=agent.role,
            description=task["marker"],
            expected_output="text",
            agent=agent,
            async_execution=agent.role != "last",
        )
        for agent in agents
    ]
    return str(Crew(name="office", agents=agents, tasks=tasks).kickoff())


async def alone(task: Any, llm: LLM) -> str:
    """Run an agent without a crew."""
    result = await agent_of("writer", model_of(llm)).kickoff_async(task["marker"])
    return result.raw


class Letters(Flow[Any]):
    def __init__(self, task: Any, llm: LLM) -> None:
        super().__init__()
        self._task = task
        self._llm = llm

    @start()
    def draft(self) -> str:
        return str(model_of(self._llm).call(self._task["marker"]))

    @listen(draft)
    def polish(self, text: str) -> str:
        return blocking(self._task, self._llm)


def flowing(task: Any, llm: LLM) -> str:
    return str(Letters(task, llm).kickoff())


def model_call_in_a_tool(task: Any, llm: LLM) -> str:
    @tool("ask")
    def ask(question: str) -> str:
        """Ask the model."""
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
            messages: Any = [{"role": "user", "content": f"{task['marker']} {question}"}]
            answer = client.chat.completions.create(model=llm.model, messages=messages)
        return answer.choices[0].message.content or ""

    return str(crew_of(task, model_of(llm), tools=[ask]).kickoff())


def between_foreign_spans(task: Any, llm: LLM) -> str:
    """Run a crew inside a custom span, with a custom span inside the crew's tool."""
    foreign = trace.get_tracer("foreign")

    @tool("ask")
    def ask(question: str) -> str:
        """Ask the model."""
        with foreign.start_as_current_span("inner"), openai.OpenAI(base_url=llm.base_url, api_key="none") as client:
            messages: Any = [{"role": "user", "content": f"{task['marker']} {question}"}]
            return str(client.chat.completions.create(model=llm.model, messages=messages))

    with foreign.start_as_current_span("outer"):
        return str(crew_of(task, model_of(llm), tools=[ask]).kickoff())


class StoppedError(Exception):
    """Raised by the agent itself."""


def raising(task: Any, llm: LLM) -> str:
    blocking(task, llm)
    raise StoppedError(task["marker"])
