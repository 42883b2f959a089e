"""The calculator of Agent Lightning's example with AutoGen; only the import line differs."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

import agl_lightning as agl
from agl_run import Quiet
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall


class Sum(TypedDict):
    """A task: two numbers to multiply, and the product."""

    id: str
    question: str
    result: str


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def assistant(model: str, address: str, temperature: float) -> AssistantAgent:
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=address,
        api_key=os.environ.get("OPENAI_API_KEY", "nobodys-token"),
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": ModelFamily.UNKNOWN,
            "structured_output": False,
        },
        temperature=temperature,
    )
    return AssistantAgent(name="calc", model_client=client, tools=[multiply], reflect_on_tool_use=True)


@agl.rollout
async def calculator(task: Sum, llm: agl.LLM) -> None:
    """Let an assistant with a tool answer, and report a reward."""
    agent = assistant(llm.model, llm.endpoint, llm.sampling_parameters.get("temperature", 0.7))
    result = await asyncio.wait_for(agent.run(task=task["question"] + " Write ANSWER: and the number."), timeout=60.0)
    found = re.search(r"ANSWER: (\d+)", result.messages[-1].to_text())  # pyright: ignore[reportAttributeAccessIssue]
    agl.emit_reward(1.0 if found and found[1] == task["result"] else 0.0)


def respond(request: ModelRequest) -> Reply:
    """Call the tool with the numbers of the question, then give its result."""
    if request.turns[-1].role == "tool":
        return Reply(text=f"ANSWER: {request.last_text}")
    first, second = (int(number) for number in re.findall(r"\d+", request.last_text)[:2])
    return Reply(tool_calls=(ToolCall("multiply", {"a": first, "b": second}),))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedModelServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ScriptedModelServer(respond=respond) as running:
        yield running


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the script leaves its clients open
def test_calculator_is_recorded_with_its_agents_name(server: ScriptedModelServer) -> None:
    sums: list[Sum] = [{"id": f"{n}", "question": f"What is {n} times 12?", "result": f"{12 * n}"} for n in range(3)]
    llm = agl.LLM(endpoint=server.base_url, model="scripted", sampling_parameters={"temperature": 1.0})
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        n_runners=2,
        tracer=agl.OtelTracer(),
        adapter=agl.LlmProxyTraceToTriplet(),
        initial_resources={"main_llm": llm},
        progress=Quiet(),
    )

    result = trainer.fit(calculator, sums[:2], val_dataset=sums[2:])

    assert [("train", 1.0), ("train", 1.0), ("val", 1.0)] == [
        (episode.rollout.mode, episode.reward) for episode in result.episodes
    ]
    assert {("calc", "calc")} == {tuple(call.agent for call in episode.transitions) for episode in result.episodes}
