"""A small harness for tests, which asks the model for shell commands, and an experiment that runs it."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_run import DevResult, Trainer, load_config
from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

HARNESS = """
import json, os, subprocess, sys, urllib.request

messages = [{"role": "user", "content": sys.stdin.read()}]
tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
while True:
    body = {"model": sys.argv[1], "messages": messages, "tools": [tool]}
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(answer)
    if not answer.get("tool_calls"):
        print(answer["content"])
        break
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
"""

TABLE = f"""
[shell]
command = ["{sys.executable}", "$folder/shell_harness.py", "$model"]
prompt = "stdin"
environment = {{ URL = "$base_url", KEY = "$key" }}
"""

FILE = """
[experiment]
name = "repairs"
harness = "shell.toml"
workspace = "repos/{name}"
val = "tasks.jsonl"

[runner]
concurrency = 2
timeout_s = 60
params = PARAMS

[policy.main]
use = "openai"
model = "scripted"
base_url = "BASE_URL"
api_key_env = ""

[[reward]]
use = "tests"
params = { command = "python -m unittest", hidden = "hidden/{name}" }
"""

WRONG = "def add(a, b):\n    return a - b\n"

TESTS = """
import unittest
from calc import add

class Adding(unittest.TestCase):
    def test_one_and_two(self):
        self.assertEqual(3, add(1, 2))

    def test_nothing(self):
        self.assertEqual(0, add(0, 0))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a workspace, its hidden tests, one task, and the harness."""
    folder = tmp_path / "project"
    for name, text in {
        "repos/add/calc.py": WRONG,
        "hidden/add/test_calc.py": TESTS,
        "tasks.jsonl": json.dumps({"name": "add", "prompt": "Repair add in calc.py."}) + "\n",
        "shell_harness.py": HARNESS,
        "shell.toml": TABLE,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    """A model that asks for no commands, unless a test gives it a script."""
    with ScriptedModelServer(default=Reply(text="Done.")) as server:
        yield server


def asks(*commands: str) -> list[Reply]:
    """Return replies that ask for shell commands, one at a time."""
    return [Reply(text="", tool_calls=(ToolCall(name="bash", arguments={"command": line}),)) for line in commands]


def dev(
    project: Path, model: ScriptedModelServer, *, file: str = FILE, params: str = "{}", tasks: int = 1
) -> DevResult:
    """Run the experiment's tasks once, without training."""
    text = file.replace("BASE_URL", model.base_url).replace("PARAMS", params)
    (project / "experiment.toml").write_text(text)
    return Trainer.from_config(load_config(project / "experiment.toml"), folder=project).dev(tasks=tasks)


def workspaces(project: Path) -> list[Path]:
    """Return the folders of the remaining sandboxes."""
    return [path for path in project.glob("runs/**/workspaces/*") if path.is_dir()]


def wait(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run async work in a new event loop, and return its result."""
    return asyncio.run(work())  # pyright: ignore[reportArgumentType]  # any awaitable
