"""Answering from passages, like Agent Lightning's example with the OpenAI Agents SDK.

Only the import line differs.
"""

import re
from pathlib import Path
from typing import Any, cast

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

import agl_lightning as agl
from agl_run import Quiet
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall

PASSAGES = {"river": "The longest river of the valley is the Orr.", "lake": "The deepest lake there is the Mesh."}


@function_tool
def retrieve(query: str) -> str:
    """Find passages that hold a word."""
    return "\n".join(text for word, text in PASSAGES.items() if word in query)


class Librarian(agl.LitAgent[dict[str, Any]]):
    """Answers from passages; validation uses the training method with other resources."""

    def __init__(self) -> None:
        super().__init__()
        self.heats: list[float | None] = []

    async def training_rollout_async(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast("agl.LLM", resources["main_llm"])
        rollout = cast("agl.AttemptedRollout", rollout)
        base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        self.heats.append(cast("float | None", llm.sampling_parameters.get("temperature")))
        client = AsyncOpenAI(base_url=base_url, api_key="unused")
        agent = Agent(
            name="Assistant",
            model=OpenAIChatCompletionsModel(model=llm.model, openai_client=client),
            model_settings=ModelSettings(max_tokens=64, temperature=self.heats[-1]),
            instructions="Answer in <answer> tags, from passages only.",
            tools=[retrieve],
        )
        result = await Runner.run(agent, task["question"])
        found = re.search(r"<answer>(.*?)</answer>", result.final_output)
        return float(bool(found and found[1] == task["answer"]))

    async def validation_rollout_async(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast("agl.LLM", resources["main_llm"])
        rollout = cast("agl.AttemptedRollout", rollout)
        address = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        cold: agl.NamedResources = {
            "main_llm": agl.LLM(endpoint=address, model=llm.model, sampling_parameters={"temperature": 0.0})
        }
        return await self.training_rollout_async(task, cold, rollout)


def respond(request: ModelRequest) -> Reply:
    """Search for the question, and answer with the last word of the result."""
    if request.turns[-1].role == "tool":
        return Reply(text=f"<answer>{request.last_text.rstrip('.').split()[-1]}</answer>")
    return Reply(tool_calls=(ToolCall("retrieve", {"query": request.last_text}),))


def test_librarian_trains_and_validates_with_its_own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    agl.setup_logging("DEBUG", console=False, apply_to=["librarian"])
    tasks = [{"question": "Which is the longest river?", "answer": "Orr"}, {"question": "The lake?", "answer": "Mesh"}]
    agent = Librarian()
    with ScriptedModelServer(respond=respond) as server:
        resources: dict[str, agl.ResourceUnion] = {
            "main_llm": agl.LLM(endpoint=server.base_url, model="scripted", sampling_parameters={"temperature": 0.7})
        }
        trainer = agl.Trainer(n_runners=1, initial_resources=resources, progress=Quiet())
        result = trainer.dev(agent, train_dataset=tasks[:1], val_dataset=tasks[1:])

    assert [0.7, 0.0] == agent.heats
    assert [1.0, 1.0] == [episode.reward for episode in result.episodes]
    assert [["Assistant"] * 2] * 2 == [[call.agent for call in episode.transitions] for episode in result.episodes]
