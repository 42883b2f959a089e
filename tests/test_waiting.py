"""The output of a run that waits: what it waits for, which step of how many it takes, and how long that still takes."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agl_testing.plugins import PluginFolder

SLOW = '''
import asyncio
import time
import agl
from agl.contracts import ServedModel, StepReport
from agl.schemas import PromptTemplate, Weights


class Slow:
    """A model that keeps the event loop busy while it loads."""

    has_token_ids = False

    def __init__(self, *, name, model="big-model", wait_s=1.5):
        self._model, self._wait_s = model, wait_s

    async def start(self):
        time.sleep(self._wait_s)
        return ServedModel(base_urls=("http://127.0.0.1:9/v1",), model=self._model)

    async def stop(self):
        pass

    async def load(self, version):
        raise NotImplementedError

    def resource(self):
        return Weights(uri="none")


class Sleeper:
    """Sleeps in its setup, and in every step."""

    def __init__(self, *, steps: int = 3, setup_s: float = 0.0, step_s: float = 1.1):
        self._steps, self._setup_s, self._step_s, self._step = steps, setup_s, step_s, 0

    async def setup(self, context):
        await asyncio.sleep(self._setup_s)

    async def step(self):
        await asyncio.sleep(self._step_s)
        self._step += 1
        return StepReport(step=self._step, is_finished=self._step >= self._steps, metrics={"loss": 0.5})

    def state(self):
        return {}

    async def restore(self, state):
        pass

    async def close(self):
        pass


@agl.hookimpl
def agl_policies():
    yield agl.PolicyEntry(name="slow", factory=Slow)


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="sleeper", factory=Sleeper, tunes=("prompt_template",), needs_token_ids=False)
'''

FILE = """
[experiment]
agent = "agent:solve"
train = "tasks.jsonl"

[gateway]
use = "none"

[resource.prompt]
template = "none"

[policy.main]
use = "slow"
params = { model = "MODEL", wait_s = WAIT_S }

[[algorithm]]
use = "sleeper"
params = PARAMS
"""


@pytest.fixture
def folder(tmp_path: Path, agl_plugins: PluginFolder) -> Path:
    agl_plugins.install(SLOW, name="slow")
    (tmp_path / "agent.py").write_text("def solve(task):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    return tmp_path


def write(folder: Path, *, model: str = "big-model", wait_s: float = 1.5, params: str = "{}") -> list[str]:
    """Write the experiment; returns the command that runs it."""
    text = FILE.replace("MODEL", model).replace("WAIT_S", str(wait_s)).replace("PARAMS", params)
    (folder / "experiment.toml").write_text(text)
    return [sys.executable, "-m", "agl", "run", str(folder / "experiment.toml")]


def lines_of(command: list[str], plugins: PluginFolder) -> list[str]:
    done = subprocess.run(command, env=plugins.environment, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    return done.stdout.splitlines()


def test_a_wait_is_named_after_a_second_and_its_end_is_told(folder: Path, agl_plugins: PluginFolder) -> None:
    (folder / "models" / "mine").mkdir(parents=True)
    params = "{ steps = 1, setup_s = 1.2, step_s = 0.0 }"

    lines = lines_of(write(folder, model="models/mine", params=params), agl_plugins)

    model = f"policy 'main': loading 'mine' from the folder {folder}/models/mine with slow"
    assert [
        f"{model} ...",
        f"{model}: done after N s",
        "setting up the algorithm sleeper ...",
        "setting up the algorithm sleeper: done after N s",
        "sleeper step 1 of 1: loss 0.500",
    ] == [re.sub(r"after \d+ s", "after N s", line) for line in lines if not line.startswith("importing")][:5]


def test_a_step_says_how_many_there_are_and_how_long_they_take(folder: Path, agl_plugins: PluginFolder) -> None:
    lines = lines_of(write(folder, wait_s=0.0), agl_plugins)

    shown = [re.sub(r"about \d+ (s|min) left", "about N s left", line) for line in lines if line.startswith("sleeper")]
    assert [
        "sleeper step 1 of 3: loss 0.500; about N s left",
        "sleeper step 2 of 3: loss 0.500; about N s left",
        "sleeper step 3 of 3: loss 0.500",
    ] == shown
    assert [] == [line for line in lines if line.startswith("policy")]  # a short wait is not named


def test_a_terminal_has_a_bar_of_all_steps_with_the_time_left(folder: Path, agl_plugins: PluginFolder) -> None:
    terminal, end = pty.openpty()
    environment = {**agl_plugins.environment, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(write(folder, wait_s=0.0), env=environment, stdout=end, stderr=end) as process:
        os.close(end)
        shown = b""
        while data := _read(terminal):
            shown += data
    os.close(terminal)

    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert 0 == process.returncode, text
    assert re.search(r"sleeper  ━+─+  1/3\s+about \d+ s left", text)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the last program that writes to it has ended
        return b""
