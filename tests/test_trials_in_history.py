"""Versions that `agl dev` makes or uses stand in a prompt's history, with where they come from."""

import json
from pathlib import Path

import pytest

from agl_testing.commands import invoke_agl, run_agl

FILE = """
[experiment]
name = "sums"
agent = "agent:solve"
train = "tasks.jsonl"
store = "sqlite:///runs.db"

[resource.style]
template = "TEXT"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text("def solve(task, style):\n    return float(len(style.template))\n")
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    return tmp_path


def say(folder: Path, text: str, *words: str) -> str:
    (folder / "sums.toml").write_text(FILE.replace("TEXT", text))
    return run_agl(*words, folder=folder)


def test_history_names_the_trials_of_each_version_and_its_experiment(folder: Path) -> None:
    say(folder, "first", "dev", "sums.toml", "--tasks", "2")
    say(folder, "second", "dev", "sums.toml", "--tasks", "1")
    said = say(folder, "second", "run", "sums.toml")
    assert "the trial uses" not in said
    said = say(folder, "third", "dev", "sums.toml", "--tasks", "1")
    assert "style: the trial uses the version sums-1-initial, which the experiment has reached" in said
    assert "--set experiment.name=NAME" in said

    shown = invoke_agl("show", "style", "--store", "runs.db", folder=folder)
    assert (
        "- sums-dev-1-initial from -, given by the experiment sums-dev; trials: 2 rollouts of sums-dev\n"
        "- sums-dev-1-initial.2 from -, given by the experiment sums-dev; trials: 1 rollout of sums-dev\n"
        "- sums-1-initial from -, given by the experiment sums; trials: 1 rollout of sums-dev\n"
    ) in shown
    listed = json.loads(invoke_agl("resources", "list", "style", "--store", "runs.db", "--json", folder=folder))
    assert [("the experiment sums", "1 rollout of sums-dev")] == [
        (each["origin"], each["tried"]) for each in listed[2:]
    ]
    assert "made by the experiment sums," in invoke_agl(
        "resources", "show", "style", "--store", "runs.db", folder=folder
    )
