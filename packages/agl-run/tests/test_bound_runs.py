"""An experiment's name belongs to the agent that ran under it, so that two scripts in one folder never mix."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl.schemas import NamedResources, PromptTemplate, Rollout
from agl_inspect.records.state import load_experiment
from agl_run import Quiet, Trainer
from agl_run.agents.agent import AgentSpec
from agl_store_sqlite._store import SQLiteStore

TASKS = ({"q": 1},)


def first(task: Any) -> float:
    return 1.0


def second(task: Any) -> float:
    return 1.0


class Third:
    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
        return 1.0


def trainer(folder: Path, prompt: str) -> Trainer:
    return Trainer(
        initial_resources={"prompt": PromptTemplate(template=prompt)}, folder=folder, progress=Quiet(), gateway="none"
    )


def prompt_of(folder: Path, version: str) -> str:
    async def read() -> str:
        store = SQLiteStore(f"sqlite:///{folder / 'runs' / 'agl.db'}")
        found = (await store.resource("prompt", version)).resource
        await store.close()
        assert isinstance(found, PromptTemplate)
        return found.template

    return asyncio.run(read())


def test_another_agent_does_not_take_over_a_name(tmp_path: Path) -> None:
    trainer(tmp_path, "one {q}").fit(first, TASKS)
    expected = (
        "experiment 'experiment' in this store runs the agent 'test_bound_runs:first', and this one is "
        "'test_bound_runs:second'; give this run another name"
    )
    for resume in (False, True):
        with pytest.raises(ConfigError, match=expected):
            trainer(tmp_path, "two {q}").fit(second, TASKS, resume=resume)
    again = trainer(tmp_path, "two {q}").fit(second, TASKS, fresh=True)
    assert "two {q}" == prompt_of(tmp_path, again.resources["prompt"])


def test_dry_run_of_another_agent_gets_its_own_prompt(tmp_path: Path) -> None:
    trainer(tmp_path, "one {q}").fit(first, TASKS)
    (own,) = trainer(tmp_path, "one {q} again").dev(first, TASKS).episodes
    (other,) = trainer(tmp_path, "two {q}").dev(second, TASKS).episodes
    assert "one {q}" == prompt_of(tmp_path, own.rollout.resources["prompt"])
    assert "two {q}" == prompt_of(tmp_path, other.rollout.resources["prompt"])


def test_record_of_an_older_release_belongs_to_whoever_continues_it(tmp_path: Path) -> None:
    async def records(*, forget: bool) -> str:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'runs' / 'agl.db'}")
        found = await load_experiment(store, "experiment")
        assert found is not None
        if forget:
            older = type(found)(name=found.name, status="running", live=found.live)
            await store.save_state({}, experiment=older)
        await store.close()
        return found.agent

    trainer(tmp_path, "one {q}").fit(first, TASKS)
    assert "test_bound_runs:first" == asyncio.run(records(forget=True))
    trainer(tmp_path, "one {q}").fit(second, TASKS, resume=True)
    assert "test_bound_runs:second" == asyncio.run(records(forget=False))


def test_agent_is_the_same_however_it_is_given(tmp_path: Path) -> None:
    assert "test_bound_runs:first" == AgentSpec.of(first).identity == AgentSpec.of("test_bound_runs:first").identity
    assert {"test_bound_runs:Third"} == {AgentSpec.of(each).identity for each in (Third, Third())}
    assert "node agent.js {task}" == AgentSpec.of(["node", "agent.js", "{task}"]).identity
    script = tmp_path / "own.py"
    script.write_text(
        "from agl_run.agents.agent import AgentSpec\n\ndef solve(task): ...\n\nprint(AgentSpec.of(solve).identity)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "own:solve" == done.stdout.strip()
