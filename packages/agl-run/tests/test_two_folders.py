"""Modules next to an experiment: modules of two folders with the same name, and modules that no agent imports."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl_inspect.terminal.program import cli
from agl_testing.plugins import PluginFolder

EXPERIMENT = """
[experiment]
name = "e"
agent = "agent_of_folders:solve"
store = "sqlite:///runs/e.db"
train = "train.jsonl"
val = "train.jsonl"

[runner]
use = "{runner}"

[gateway]
use = "none"

[resource.style]
template = "{{q}}"
"""


def tried(folder: Path, *, runner: str, reward: float) -> Result:
    folder.mkdir()
    (folder / "agent_of_folders.py").write_text(f"def solve(task):\n    return {reward}\n")
    (folder / "train.jsonl").write_text('{"q": 1}\n')
    (folder / "e.toml").write_text(EXPERIMENT.format(runner=runner))
    return CliRunner().invoke(cli, ["resources", "try", str(folder / "e.toml"), "--text", "say {q}", "--json"])


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "agent_of_folders", raising=False)


@pytest.mark.long
def test_agents_in_processes_of_their_own_are_those_of_their_folders(tmp_path: Path) -> None:
    for name, reward, other in (("a", 0.25, 0.75), ("b", 0.75, 0.25)):
        result = tried(tmp_path / name, runner="process", reward=reward)
        assert 0 == result.exit_code, result.output
        assert str(reward) in result.output
        assert str(other) not in result.output


def test_agent_in_this_process_that_is_another_folders_is_refused(tmp_path: Path) -> None:
    first = tried(tmp_path / "a", runner="async", reward=0.25)
    assert 0 == first.exit_code, first.output
    second = tried(tmp_path / "b", runner="async", reward=0.75)
    assert 1 == second.exit_code
    assert "'agent_of_folders' for the agent is imported from" in second.output


PLUGIN = """
import importlib

import agl


class WithPart:
    def __init__(self, *, part):
        self.part = importlib.import_module(part)

    async def setup(self, context):
        pass

    async def step(self):
        pass

    def state(self):
        return None

    async def restore(self, state):
        pass

    async def close(self):
        pass


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="with-part", factory=WithPart, tunes=("prompt_template",), needs_token_ids=False)
"""

COMMAND = """
[[algorithm]]
use = "with-part"
params = { part = "part_of_experiment" }
"""


def test_module_beside_an_experiment_is_found_where_the_agent_is_a_program(
    tmp_path: Path, agl_plugins: PluginFolder
) -> None:
    agl_plugins.install(PLUGIN, name="parts")
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"q": 1}\n')
    text = EXPERIMENT.format(runner="command").replace('"agent_of_folders:solve"', '["true"]')
    (folder / "e.toml").write_text(text + COMMAND)
    (folder / "part_of_experiment.py").write_text("")
    result = CliRunner().invoke(cli, ["check", str(folder / "e.toml")], catch_exceptions=False)
    assert 0 == result.exit_code, result.output
