"""Agents and clients created in a program's modules, used by eight rollouts at once and by successive runs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Runner
from openai import AsyncOpenAI

from agl_testing.model_server import ScriptedModelServer
from tests.repeats import check_processes, check_repeats

from . import programs

PROGRAM = '''"""An agent of the SDK, in a module as processes import it."""

from agents import Agent, OpenAIChatCompletionsModel, Runner
from openai import AsyncOpenAI


def solve(task, main):
    client = AsyncOpenAI(base_url=main.base_url, api_key=main.api_key or "none", max_retries=0)
    model = OpenAIChatCompletionsModel(model=main.model, openai_client=client)
    Runner.run_sync(Agent(name="helper", model=model), task["marker"])
    return 1.0
'''

HELPER = Agent[Any](name="helper", model="scripted")
"""An agent whose calls use the client that the SDK shares within a process."""

Make = Callable[[AsyncOpenAI], Callable[[Any], Any]]


def run_sync(_: AsyncOpenAI) -> Callable[[Any], Any]:
    def agent(task: Any) -> float:
        for question in (task["marker"], f"{task['marker']} again"):
            Runner.run_sync(HELPER, question)
        return 1.0

    return agent


def own_loop(client: AsyncOpenAI) -> Callable[[Any], Any]:
    """Start an event loop and a client for each rollout."""

    async def twice(question: str) -> None:
        for _ in range(2):
            await Runner.run(programs.helper(client), question)

    def agent(task: Any) -> float:
        asyncio.run(twice(task["marker"]))
        return 1.0

    return agent


def coroutine(client: AsyncOpenAI) -> Callable[[Any], Any]:
    async def agent(task: Any) -> float:
        await asyncio.gather(*(Runner.run(programs.helper(client), task["marker"]) for _ in range(2)))
        return 1.0

    return agent


# `run_sync` finalises the generators of its thread's loop, then uses the loop again; asyncio warns of that.
@pytest.mark.filterwarnings("ignore:asynchronous generator:ResourceWarning")
@pytest.mark.parametrize("gateway", ["none", "auto"])
@pytest.mark.parametrize("make", [run_sync, own_loop, coroutine])
def test_shared_clients_work_in_every_rollout_of_every_run(
    make: Make, gateway: str, server: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    client = AsyncOpenAI(max_retries=0)

    check_repeats(make(client), server, tracers=["openai-agents"], gateway=gateway, folder=tmp_path, calls=2)


@pytest.mark.long
def test_an_agent_in_processes_is_recorded_under_its_names(server: ScriptedModelServer, tmp_path: Path):
    check_processes(PROGRAM, server, tracer="openai-agents", agents=("helper",), folder=tmp_path)
