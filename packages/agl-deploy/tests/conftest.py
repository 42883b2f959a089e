"""An experiment to deploy, and functions that run ``agl deploy`` on it."""

import subprocess
import sys
from pathlib import Path

import pytest

from agl import PluginManager

AGENT = """import openai
from deploy_helpers.asking import question_of


async def solve(task, small):
    async with openai.AsyncOpenAI(base_url=small.base_url, api_key=small.api_key) as client:
        messages = [{"role": "user", "content": question_of(task)}]
        answer = await client.chat.completions.create(model=small.model, messages=messages)
    return float(answer.choices[0].message.content == "42")
"""

FILE = """[experiment]
name = "answers"
agent = "deploy_agent:solve"
val = "tasks.jsonl"

[runner]
concurrency = 1

[policy.small]
use = "openai"
model = "small"
base_url = "http://models.example/v1"
api_key_env = "DEPLOY_MODEL_KEY"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with an experiment, its agent and its tasks."""
    (tmp_path / "deploy_helpers").mkdir()
    (tmp_path / "deploy_helpers" / "__init__.py").write_text("")
    (tmp_path / "deploy_helpers" / "asking.py").write_text("def question_of(task):\n    return task['question']\n")
    (tmp_path / "deploy_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 40 + 2?"}\n' * 4)
    (tmp_path / "experiment.toml").write_text(FILE)
    return tmp_path


def deploy(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``agl deploy``, and return the finished process."""
    command = [sys.executable, "-m", "agl", "deploy", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def manager() -> PluginManager:
    return PluginManager.from_environment()


def change(file: Path, old: str, new: str) -> None:
    """Replace a text in a file."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
