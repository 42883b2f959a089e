"""A toy plugin for whole experiments: a policy that serves an endpoint, and an algorithm that only counts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import certifi
import pytest

from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder

TOY = '''
import asyncio
import agl
from agl.contracts import StepReport
from agl.schemas import Weights
from agl_testing.toys import ToyAlgorithm, ToyPolicy


class Counter(ToyAlgorithm):
    """Trains nothing: adds up the rewards of the rollouts that it consumed, and publishes the sum as its weights."""

    def __init__(self, *, steps: int = 20, tasks_per_step: int = 3, pause_s: float = 0.0):
        self._steps, self._tasks, self._pause = steps, tasks_per_step, pause_s
        self._step, self._sum, self._tokens = 0, 0.0, 0

    async def step(self):
        step = self._step + 1
        tasks = [self._context.train[(step * self._tasks + i) % len(self._context.train)] for i in range(self._tasks)]
        collected = await self._context.collect(tasks, step=step, n=2)
        await asyncio.sleep(self._pause)
        self._sum += sum(episode.reward for episode in collected.episodes)
        self._tokens += sum(sum(row.mask) for episode in collected.episodes for row in episode.rows)
        await self._context.publish(self._context.tunes[0], Weights(uri=f"sum-{self._sum:g}"), step=step)
        self._step = step
        return StepReport(
            step=step,
            is_finished=step >= self._steps,
            metrics={"sum": self._sum},
            trained=tuple(episode.rollout.rollout_id for episode in collected.episodes),
        )

    def state(self):
        return {"step": self._step, "sum": self._sum, "tokens": self._tokens}

    async def restore(self, state):
        self._step, self._sum, self._tokens = state["step"], state["sum"], state["tokens"]


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="counter", factory=Counter)


@agl.hookimpl
def agl_policies():
    yield agl.PolicyEntry(name="served", factory=ToyPolicy, trains=True)
'''

AGENT = '''
import os

import httpx2


def solve(task):
    """An ordinary agent: it knows nothing of who runs it. A process would import openai for a second."""
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with httpx2.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=600) as client:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            answer = client.post("/chat/completions", json={"model": "scripted", "messages": messages})
            text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
    return text
'''

PATIENT = '''
import openai


def solve(task):
    """An ordinary agent whose client tries a failed call again, as one needs where gateways are killed."""
    with openai.OpenAI() as client:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            answer = client.chat.completions.create(model="scripted", messages=messages)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
    return text
'''

AGL = """
import os
import socket

if name := os.environ.get("HOST_NAME"):
    socket.gethostname = lambda: name
from agl_inspect.terminal.program import main

main()
"""
"""The command, on a machine of the name in ``HOST_NAME``."""

TASKS = [{"question": f"what is {n}?", "answer": str(n)} for n in range(7)]


def answer_of(question: str) -> str:
    """The scripted model's answer."""
    return question.removeprefix("what is ").removesuffix("?")


@pytest.fixture
def server():
    """A model that answers every question rightly, over and over."""
    with ScriptedModelServer(
        respond=lambda request: Reply(text=answer_of(request.body["messages"][0]["content"]))
    ) as s:
        yield s


@pytest.fixture
def toy(agl_plugins: PluginFolder) -> str:
    """The toy plugin, installed: the policy ``served`` and the algorithm ``counter``."""
    return agl_plugins.install(TOY, name="toy")


@pytest.fixture
def experiment(tmp_path: Path, server: ScriptedModelServer, agl_plugins: PluginFolder) -> Callable[..., Path]:
    """Writes an experiment with the toy plugin and returns its file."""
    agl_plugins.install(TOY, name="toy")

    def write(
        *,
        steps: int = 5,
        pause_s: float = 0.0,
        runner: str = "async",
        agent: str = AGENT,
        tasks: Sequence[dict] = TASKS,
    ) -> Path:
        folder = tmp_path / "experiment"
        folder.mkdir(exist_ok=True)
        (folder / "toy_agent.py").write_text(agent)
        (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        file = folder / "experiment.toml"
        file.write_text(f"""
[experiment]
name = "toy"
agent = "toy_agent:solve"
store = "sqlite:///runs/toy.db"
train = "train.jsonl"
hidden = ["answer"]

[runner]
use = "{runner}"
concurrency = 3

[policy.main]
use = "served"
base_url = "{server.base_url}"

[[algorithm]]
use = "counter"
tunes = "main"
params = {{ steps = {steps}, pause_s = {pause_s} }}

[[reward]]
use = "exact-match"
""")
        return file

    return write


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one certificate: each client of an agent in a process would read the system's for 30 ms."""
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file.write_text(first + end)
    return file


@pytest.fixture
def agl(agl_plugins: PluginFolder, certificate: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the ``agl`` command with the toy plugin; the caller waits for it, and what still runs is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, cwd: Path, log: int | IO[bytes] = subprocess.PIPE, **more: str) -> subprocess.Popen[str]:
        environment = {**agl_plugins.environment, "AGL_SECRET": "x" * 32, "XDG_STATE_HOME": str(tmp_path / "state")}
        environment.pop("OPENAI_BASE_URL", None)
        environment["OPENAI_API_KEY"] = "sk-the-users-own-key-0123456789"
        environment["SSL_CERT_FILE"] = str(certificate)
        environment.update(more)
        process = subprocess.Popen(
            [sys.executable, "-c", AGL, *words],
            cwd=cwd,
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )
        started.append(process)
        return process

    os.environ.pop("AGL_STORE", None)
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
