"""Agents that a runner brings: ``agent = "RUNNER:NAME"``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl import PluginManager
from agl.errors import ConfigError, PluginError
from agl_run import Trainer, parse_config

SOURCE = """
from agl import hookimpl
from agl.contracts import RunnerEntry
from agl.errors import ConfigError
from agl_run import AgentSpec, AsyncRunner


class Games:
    def __new__(cls, setup):
        agent = AgentSpec(target=lambda task: setup.agent.args["reward"])
        return AsyncRunner(type(setup)(agent=agent, store=setup.store, secret=setup.secret, resources=setup.resources))

    @staticmethod
    def check(agent):
        if agent.name != "chess":
            raise ConfigError(f"no game {agent.name!r}")

    @staticmethod
    def tasks(agent):
        return [{"move": n} for n in range(agent.args.get("moves", 3))], [{"move": 9}]


@hookimpl
def agl_runners():
    yield RunnerEntry(name="games", factory=Games)
    yield RunnerEntry(name="plain", factory=AsyncRunner)
"""

Make = Callable[..., Trainer]


@pytest.fixture
def trainer(tmp_path: Path, install_plugin: Any) -> Make:
    """Return a function that creates trainers, with an installed runner ``games`` that brings the agent ``chess``."""
    install_plugin("agl-games", SOURCE, entry="games")

    def make(**sections: Any) -> Trainer:
        sections["experiment"] = {"store": "memory://", "agent": "games:chess", **sections.get("experiment", {})}
        return Trainer.from_config(parse_config(sections), folder=tmp_path, plugins=PluginManager.from_environment())

    return make


def test_runner_brings_agent_and_tasks(trainer: Make) -> None:
    made = trainer(experiment={"agent_args": {"reward": 0.5}})
    plan = made.plan()
    assert ("games", "games:chess") == (plan.config.runner.use, plan.agent.identity)
    assert ([{"move": 0}, {"move": 1}, {"move": 2}], [{"move": 9}]) == (plan.train, plan.val)
    assert [0.5] == [episode.reward for episode in made.dev(tasks=1).episodes]


def test_tasks_of_the_experiment_come_first(trainer: Make, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"move": 7}\n')
    plan = trainer(experiment={"train": "own.jsonl"}).plan()
    assert ([{"move": 7}], []) == (plan.train, plan.val)


def test_agent_is_given_to_plan_as_well(trainer: Make) -> None:
    assert "games:chess" == trainer(experiment={"agent": "agent:solve"}).plan("games:chess").agent.identity


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        ({"experiment": {"agent": "games:go"}}, "no game 'go'"),
        ({"runner": {"use": "process"}}, "the agent 'games:chess' comes with the runner 'games'; remove [runner] use"),
        ({"experiment": {"harness": "pi"}}, "remove experiment.harness and experiment.workspace"),
        ({"experiment": {"agent": "plain:solve", "agent_args": {"a": 1}}}, "experiment.agent_args has a, and only"),
        ({"experiment": {"agent": "plain:solve", "val": "own.jsonl"}}, "no module 'plain' for the agent"),
    ],
)
def test_mixture_is_refused(trainer: Make, tmp_path: Path, sections: dict[str, Any], cause: str) -> None:
    (tmp_path / "own.jsonl").write_text('{"move": 7}\n')
    with pytest.raises(ConfigError) as refused:
        trainer(**sections).plan()
    assert cause in str(refused.value)


def test_module_of_the_experiment_with_the_runners_name_is_refused(trainer: Make, tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text("def chess(task):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"may be the runner 'games''s or in games\.py; rename that module"):
        trainer().plan()


def test_runner_that_is_not_installed_is_named_with_its_package(tmp_path: Path, site: Path) -> None:
    (site / "verifiers.py").write_text("wordle = None\n")  # what the library itself would be
    config = parse_config({"experiment": {"agent": "verifiers:wordle", "store": "memory://"}})
    with pytest.raises(
        PluginError, match=r"no runner is named 'verifiers'; run: pip install -e packages/agl-core .*agl-environments"
    ):
        Trainer.from_config(config, folder=tmp_path, plugins=PluginManager()).plan()


def test_module_of_the_experiment_with_the_name_of_a_missing_runner_is_the_agent(tmp_path: Path, site: Path) -> None:
    (tmp_path / "verifiers.py").write_text("def solve(task):\n    return 1.0\n")
    config = parse_config({"experiment": {"agent": "verifiers:solve", "store": "memory://"}})
    made = Trainer.from_config(config, folder=tmp_path, plugins=PluginManager.from_environment(disabled=["verifiers"]))
    assert "verifiers:solve" == made.plan(None, [{"a": 1}]).agent.path
