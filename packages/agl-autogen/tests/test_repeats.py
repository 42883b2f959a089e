"""Clients created in a program's modules, used by eight rollouts at once and by successive runs."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

from agl_testing.model_server import ScriptedModelServer
from tests.repeats import check_processes, check_repeats

from . import agents

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # clients outlive their tests

PROGRAM = '''"""An agent of AutoGen, in a module as processes import it."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)


async def solve(task, main):
    settings = {"model": main.model, "base_url": main.base_url, "api_key": main.api_key or "none"}
    client = OpenAIChatCompletionClient(**settings, model_info=INFO)
    await AssistantAgent("calc", model_client=client).run(task=task["marker"])
    await client.close()
    return 1.0
'''

Make = Callable[[OpenAIChatCompletionClient], Callable[[Any], Any]]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage here, where warnings about the connections of ended loops are expected."""
    yield
    gc.collect()


async def ask(client: OpenAIChatCompletionClient, question: str) -> float:
    for _ in range(2):
        await AssistantAgent("calc", model_client=client).run(task=question)
    return 1.0


def own_loop(client: OpenAIChatCompletionClient) -> Callable[[Any], Any]:
    """Start an event loop for each rollout."""
    return lambda task: asyncio.run(ask(client, task["marker"]))


def coroutine(client: OpenAIChatCompletionClient) -> Callable[[Any], Any]:
    async def agent(task: Any) -> float:
        return await ask(client, task["marker"])

    return agent


@pytest.mark.parametrize("gateway", ["none", "auto"])
@pytest.mark.parametrize("make", [own_loop, coroutine])
def test_shared_clients_work_in_every_rollout_of_every_run(
    make: Make, gateway: str, model_server: ScriptedModelServer, tmp_path: Path
):
    settings: Any = {"model": "scripted", "base_url": model_server.base_url, "api_key": "none", "max_retries": 0}
    client = OpenAIChatCompletionClient(**settings, model_info=agents.INFO)

    check_repeats(make(client), model_server, tracers=["autogen"], gateway=gateway, folder=tmp_path, calls=2)


@pytest.mark.long
def test_an_agent_in_processes_is_recorded_under_its_names(model_server: ScriptedModelServer, tmp_path: Path):
    check_processes(PROGRAM, model_server, tracer="autogen", agents=("calc",), folder=tmp_path)
