"""Models created in a program's modules, used by eight rollouts at once and by successive runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import crewai
import pytest

from agl_testing.model_server import ScriptedModelServer
from tests.repeats import check_processes, check_repeats

from . import agents

PROGRAM = '''"""A crew, in a module as processes import it."""

import crewai


def solve(task, main):
    model = crewai.LLM(model=main.model, provider="openai", base_url=main.base_url, api_key=main.api_key or "none")
    writer = crewai.Agent(role="writer", goal="write", backstory="none", llm=model)
    letter = crewai.Task(name="letter", description=task["marker"], expected_output="text", agent=writer)
    crewai.Crew(name="office", agents=[writer], tasks=[letter]).kickoff()
    return 1.0
'''

Make = Callable[[crewai.LLM], Callable[[Any], Any]]


def blocking(model: crewai.LLM) -> Callable[[Any], Any]:
    def agent(task: Any) -> float:
        agents.crew_of(task, model).kickoff()
        return 1.0

    return agent


def coroutine(model: crewai.LLM) -> Callable[[Any], Any]:
    async def agent(task: Any) -> float:
        await agents.crew_of(task, model).akickoff()
        return 1.0

    return agent


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CrewAI's own, of its own parts
@pytest.mark.parametrize(("make", "gateway"), [(blocking, "none"), (coroutine, "auto")])
def test_shared_models_work_in_every_rollout_of_every_run(
    make: Make, gateway: str, model_server: ScriptedModelServer, tmp_path: Path
):
    model = crewai.LLM(model="scripted", provider="openai", base_url=model_server.base_url, api_key="none")

    check_repeats(make(model), model_server, tracers=["crewai"], gateway=gateway, folder=tmp_path)


@pytest.mark.long
def test_an_agent_in_processes_is_recorded_under_its_names(model_server: ScriptedModelServer, tmp_path: Path):
    check_processes(PROGRAM, model_server, tracer="crewai", agents=("writer",), folder=tmp_path)
