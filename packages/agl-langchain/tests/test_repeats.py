"""Models created in a program's modules, used by eight rollouts at once and by successive runs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from agl_testing.model_server import ScriptedModelServer
from tests.repeats import check_processes, check_repeats

LANGGRAPH = '''"""LangGraph's functional API, in a module as processes import it."""

from langchain_openai import ChatOpenAI
from langgraph.func import entrypoint
from langgraph.func import task as step


def solve(task, main):
    model = ChatOpenAI(model=main.model, base_url=main.base_url, api_key=main.api_key or "none", max_retries=0)

    @step
    def draft(question):
        return model.invoke(question).content

    @entrypoint()
    def flow(question):
        return draft(question).result()

    flow.invoke(task["marker"])
    return 1.0
'''

Make = Callable[[ChatOpenAI], Callable[[Any], Any]]


def blocking(model: ChatOpenAI) -> Callable[[Any], Any]:
    def agent(task: Any) -> float:
        for _ in range(2):
            model.invoke(task["marker"])
        return 1.0

    return agent


def own_loop(model: ChatOpenAI) -> Callable[[Any], Any]:
    """Start an event loop for each rollout, while all rollouts share LangChain's asynchronous clients."""

    async def twice(question: str) -> None:
        for _ in range(2):
            await model.ainvoke(question)

    def agent(task: Any) -> float:
        asyncio.run(twice(task["marker"]))
        return 1.0

    return agent


def coroutine(model: ChatOpenAI) -> Callable[[Any], Any]:
    async def agent(task: Any) -> float:
        await asyncio.gather(*(model.ainvoke(task["marker"]) for _ in range(2)))
        return 1.0

    return agent


@pytest.mark.parametrize("gateway", ["none", "auto"])
@pytest.mark.parametrize("make", [blocking, own_loop, coroutine])
def test_shared_models_work_in_every_rollout_of_every_run(
    make: Make, gateway: str, server: ScriptedModelServer, tmp_path: Path
):
    settings: Any = {"model": "scripted", "base_url": server.base_url, "api_key": "none", "max_retries": 0}

    check_repeats(
        make(ChatOpenAI(**settings)), server, tracers=["langchain"], gateway=gateway, folder=tmp_path, calls=2
    )


def test_an_agent_in_processes_is_recorded_under_its_names(server: ScriptedModelServer, tmp_path: Path):
    check_processes(LANGGRAPH, server, tracer="langchain", agents=("draft",), folder=tmp_path)
