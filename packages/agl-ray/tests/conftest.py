"""One Ray cluster of this machine for the tests of a process, with an algorithm of the tests' own, and a model server.

Ray's own processes are started once, because they take seconds.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_ray.cluster import Cluster
from agl_testing.experiments import write_experiment
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

LOGICAL_CPUS = 8
LOGICAL_GPUS = 2


AGENT = """
import asyncio
import os
import httpx2


async def solve(task, llm, style):
    with open("SEEN", "a") as file:
        file.write(f"{os.getpid()}\\n")
    headers = {"authorization": f"Bearer {llm.api_key or 'none'}"}
    body = {"model": llm.model, "messages": [{"role": "user", "content": task["question"] + style.template}]}
    async with httpx2.AsyncClient(headers=headers, timeout=600) as client:
        answer = (await client.post(f"{llm.base_url}/chat/completions", json=body)).raise_for_status().json()
    await asyncio.sleep(task.get("seconds", 0))
    return float(answer["choices"][0]["message"]["content"] == "4")
"""
"""An agent without a client library, which every process would import for a second."""

ALGORITHM = '''
import asyncio
import json
import os
import time
from agl import AlgorithmEntry, PromptTemplate, hookimpl
from agl.contracts import StepReport
from agl.errors import ConfigError


class OneWayError(Exception):
    """Cannot be read again where it arrives, as errors of some clients."""

    def __init__(self, *, code):
        super().__init__(f"the client got {code}")


class Trap:
    """Tasks that cannot be read."""

    def __iter__(self):
        raise OneWayError(code=429)

    __len__ = __getitem__ = __iter__


class Unreadable:
    """Cannot be made again where it arrives."""

    def __reduce__(self):
        return int, ("no number",)


class Pacing:
    """Collects a task, publishes a prompt, and notes in a file which GPUs it saw and when."""

    def __init__(
        self, *, steps: int = 2, work_s: float = 0.2, asks_policy: bool = False, breaks: str = ""
    ) -> None:
        self.steps, self.work_s, self.asks_policy, self.done = steps, work_s, asks_policy, 0
        self.breaks = breaks

    async def setup(self, context):
        self.context = context
        if self.steps < 1:
            raise ConfigError("steps must be at least 1")

    async def step(self):
        context, step = self.context, self.done + 1
        if self.asks_policy:
            context.policy("main_llm").engine
        assert getattr(context.policy("main_llm"), "offer_weights", None) is None
        if self.breaks == "store":
            await context.store.attempts("nobody")
        if self.breaks == "step":
            raise OneWayError(code=429)
        if self.breaks == "answer":
            await context.collect(Trap(), step=step, n=1)
        if self.breaks == "words":
            context.say(Unreadable())
            await asyncio.sleep(3600)
        context.reads("SomeProcessor 1.0")
        collected = await context.collect(context.train[:2], step=step, n=1)
        trained = tuple(episode.rollout.rollout_id for group in collected.groups() for episode in group)
        began = time.time()
        await asyncio.sleep(self.work_s)
        note = {
            "name": context.name, "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "began": began, "ended": time.time(), "live": dict(context.live()), "step": step,
            "trained": trained,
        }
        with open(context.folder / "notes.jsonl", "a") as file:
            file.write(json.dumps(note) + "\\n")
        name = context.tunes[0]
        await context.publish(name, PromptTemplate(template=f" step {step}"), step=step)
        assert context.current(name).resource.template == f" step {step}"
        context.progress(step, self.steps, "pacing")
        context.say(f"took step {step}")
        self.done = step
        return StepReport(
            step=step, is_finished=step >= self.steps, trained=trained, metrics={"rollouts": float(len(trained))}
        )

    def state(self):
        return {"done": self.done}

    async def restore(self, state):
        self.done = state["done"]

    async def close(self):
        pass


@hookimpl
def agl_algorithms():
    yield AlgorithmEntry(
        name="pacing", factory="agl_pacing:Pacing", tunes=("prompt_template",), needs_token_ids=False
    )
'''


@pytest.fixture(scope="session", autouse=True)
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests a key and plugins, and hide any Ray cluster of the machine."""
    toys = PluginFolder(tmp_path_factory.mktemp("toys"))
    toys.install(ALGORITHM, name="pacing")
    toys.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGL_SECRET", "a-secret-of-the-tests-with-enough-characters")
        patch.setenv("OPENAI_API_KEY", "none")
        patch.setenv("PYTHONPATH", toys.environment["PYTHONPATH"])
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written to the home folder
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # processes that no test uses
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
    toys.close()


@pytest.fixture(scope="session")
def ray(_place: None) -> Iterator[Any]:
    """Return Ray, connected to a cluster with logical CPUs and GPUs."""
    import ray

    size: dict[str, Any] = {"num_cpus": LOGICAL_CPUS, "num_gpus": LOGICAL_GPUS, "resources": {"desk": 1}}
    cluster = Cluster("local", started=size)
    asyncio.run(cluster.connect())
    yield ray
    asyncio.run(cluster.disconnect())


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=lambda _: Reply(text="4")) as server:
        yield server


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment in a folder.

    Attributes:
        file: The experiment file.
        seen: A file with the process of every attempt, one a line.
    """

    file: Path
    seen: Path

    @property
    def processes(self) -> list[str]:
        return self.seen.read_text().split()


@pytest.fixture
def experiment(model: ScriptedModelServer) -> Callable[..., Experiment]:
    """Return a function that writes an experiment whose agent notes the process, asks the model once and waits."""

    def write(folder: Path, *, tasks: int = 6, seconds: float = 0.0, more: str = "", name: str = "") -> Experiment:
        folder.mkdir(parents=True, exist_ok=True)
        seen = folder / "seen"
        seen.touch()
        train = [{"question": f"2 + 2 at the {number}th time", "seconds": seconds} for number in range(tasks)]
        agent, text = AGENT.replace("SEEN", str(seen)), f'[resource.style]\ntemplate = "?"\n\n{more}'
        file = write_experiment(folder, base_url=model.base_url, agent=agent, train=train, val=train[:1], more=text)
        if name:
            file.write_text(file.read_text().replace('name = "small"', f'name = "{name}"'))
        return Experiment(file=file, seen=seen)

    return write
