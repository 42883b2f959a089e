"""Frameworks that create GenAI spans themselves need no adapter, because the OpenTelemetry tracer records them.

Tested with Microsoft's agent-framework and with pydantic-ai; skipped where they are not installed. A person switches
on the framework's own instrumentation, which is one line in each.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tests.adapters", reason="agl-testing is not installed")

from agl import semconv
from agl.schemas import LLM
from agl.tracing import OtelTracer, WireTracer
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status, Step, ToolCall
from tests.adapters import Played, check_rollouts, play

ONE = [{"marker": "task-0;"}]
MANY = [{"marker": f"task-{number};"} for number in range(8)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


def api_of(llm: LLM) -> Any:
    """Return OpenAI's client, which must be closed on the event loop that used it."""
    import openai

    return openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none")


def framework_agent(llm: LLM, api: Any) -> Any:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model=llm.model, async_client=api)
    return Agent(client, "Add.", name="calc", tools=[add, divide])


async def agent_framework(task: Any, llm: LLM) -> str:
    async with api_of(llm) as api:
        return (await framework_agent(llm, api).run(task["marker"])).text


async def agent_framework_streamed(task: Any, llm: LLM) -> str:
    async with api_of(llm) as api:
        return "".join([part.text async for part in framework_agent(llm, api).run(task["marker"], stream=True)])


def pydantic_agent(llm: LLM, api: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=api))
    return Agent(model, name="calc", tools=[add, divide])


async def pydantic_ai(task: Any, llm: LLM) -> str:
    async with api_of(llm) as api:
        return str((await pydantic_agent(llm, api).run(task["marker"])).output)


async def pydantic_ai_streamed(task: Any, llm: LLM) -> str:
    async with api_of(llm) as api, pydantic_agent(llm, api).run_stream(task["marker"]) as result:
        return str(await result.get_output())


def _instrument(framework: str) -> None:
    if framework == "agent_framework":
        from agent_framework.observability import enable_instrumentation

        enable_instrumentation(enable_sensitive_data=True)
    else:
        from pydantic_ai import Agent

        Agent.instrument_all()


Agent = Callable[[Any, LLM], Any]
PLAIN: dict[str, Agent] = {"agent_framework": agent_framework, "pydantic_ai": pydantic_ai}
STREAMED: dict[str, Agent] = {"agent_framework": agent_framework_streamed, "pydantic_ai": pydantic_ai_streamed}


@pytest.fixture(params=PLAIN)
def framework(request: pytest.FixtureRequest) -> str:
    """Return the name of a framework, with its own instrumentation switched on."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param.replace('_', '-')} is not installed")
    _instrument(request.param)
    return request.param


def use(*calls: ToolCall) -> Callable[[ModelRequest], Step]:
    """Return a model that calls the tools once and then answers."""

    def respond(request: ModelRequest) -> Step:
        is_first = not any(turn.role in ("assistant", "tool") for turn in request.turns)
        return Reply(tool_calls=calls) if is_first and calls else Reply(text="done")

    return respond


SUM = use(ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4}))


def run(agent: Agent, tasks: list[Any], server: ScriptedModelServer) -> list[Played]:
    return play(agent, tasks, server=server, tracers=[OtelTracer(), WireTracer()])


def test_agent_and_its_tools_are_known(framework: str, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(SUM)
    (item,) = run(PLAIN[framework], ONE, model_server)
    assert ("succeeded", ["calc", "calc"]) == (item.outcome.status, item.agents), item.outcome.error
    check_rollouts([item], model_server)
    tools = item.named("execute_tool add")
    assert 2 == len(tools)
    assert {"add"} == {tool.attributes[semconv.TOOL_NAME] for tool in tools}
    assert ["invoke_agent calc"] == item.path_of(item.calls[0])[:1]
    assert [] == [span.name for span in item.spans if span.status == "error"]


def test_failed_tool_is_an_error(framework: str, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(use(ToolCall("divide", {"a": 1, "b": 0})))
    (item,) = run(PLAIN[framework], ONE, model_server)
    assert ["error"] == [span.status for span in item.named("execute_tool divide")]
    check_rollouts([item], model_server)


def test_streamed_answers(framework: str, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(SUM)
    (item,) = run(STREAMED[framework], ONE, model_server)
    assert ("succeeded", ["calc", "calc"]) == (item.outcome.status, item.agents), item.outcome.error
    check_rollouts([item], model_server)


def test_retry_is_one_call(framework: str, model_server: ScriptedModelServer) -> None:
    model_server.enqueue(Status(code=429, retry_after=0.01), Reply(text="at last"))
    (item,) = run(PLAIN[framework], ONE, model_server)
    assert ("succeeded", ["superseded", ""]) == (item.outcome.status, [c.reject for c in item.episode.transitions])
    check_rollouts([item], model_server)


def test_failing_model_call_is_the_agents_error(framework: str, model_server: ScriptedModelServer) -> None:
    model_server.respond_with(lambda _: Status(code=400, message="no such thing"))
    (item,) = run(PLAIN[framework], ONE, model_server)
    assert "failed" == item.outcome.status
    assert ["error"] == [span.status for span in item.named("invoke_agent calc")]
    check_rollouts([item], model_server)


@pytest.mark.parametrize("agents", [PLAIN, STREAMED], ids=["plain", "streamed"])
def test_rollouts_at_once_keep_apart(
    framework: str, model_server: ScriptedModelServer, agents: dict[str, Agent]
) -> None:
    model_server.respond_with(SUM)
    played = run(agents[framework], MANY, model_server)
    assert [["calc", "calc"]] * 8 == [item.agents for item in played]
    check_rollouts(played, model_server)
