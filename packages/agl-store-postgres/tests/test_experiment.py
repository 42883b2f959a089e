"""Whole experiments on a PostgreSQL store, run by ``agl`` commands in separate processes."""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl.contracts import RolloutQuery
from agl_inspect.records.state import load_experiment, trained_rollouts
from agl_inspect.terminal.program import cli
from agl_store_postgres.store import PostgresStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder

STEPS, ROLLOUTS_PER_STEP = 6, 6
SECRET = "secret-of-the-database"

ALGORITHM = '''
import asyncio
import agl
from agl.contracts import StepReport
from agl.schemas import Weights
from agl_testing.toys import ToyAlgorithm, ToyPolicy


class Counter(ToyAlgorithm):
    """Adds up the rewards of what it trained on."""

    def __init__(self, *, steps):
        self._steps, self._step, self._sum = steps, 0, 0.0

    async def step(self):
        step = self._step + 1
        tasks = [self._context.train[(step * 3 + i) % len(self._context.train)] for i in range(3)]
        collected = await self._context.collect(tasks, step=step, n=2)
        await asyncio.sleep(0.2)
        self._sum += sum(episode.reward for episode in collected.episodes)
        await self._context.publish("main", Weights(uri=f"sum-{self._sum:g}"), step=step)
        self._step = step
        trained = tuple(episode.rollout.rollout_id for episode in collected.episodes)
        return StepReport(step=step, is_finished=step >= self._steps, metrics={"sum": self._sum}, trained=trained)

    def state(self):
        return {"step": self._step, "sum": self._sum}

    async def restore(self, state):
        self._step, self._sum = state["step"], state["sum"]


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
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    asked = {"model": "scripted", "messages": [{"role": "user", "content": task["question"]}]}
    with httpx2.Client(transport=httpx2.HTTPTransport(retries=2), timeout=600) as client:
        answer = client.post(f"{url}/chat/completions", json=asked, headers={"authorization": f"Bearer {key}"})
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]
'''

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def store_url(server, url: str) -> str:
    """Return a URL with a password that no command may show."""
    schema = url.rpartition("=")[2]
    with server.connect() as connection:
        connection.execute(f"CREATE ROLE trainer_{schema} LOGIN SUPERUSER PASSWORD '{SECRET}'")
    return f"{server.url_for(user=f'trainer_{schema}:{SECRET}')}?schema={schema}"


@pytest.fixture
def agl(agl_plugins: PluginFolder, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the ``agl`` command; commands that still run after the test are killed."""
    agl_plugins.install(ALGORITHM, name="toy")
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", "from agl_inspect.terminal.program import main; main()", *words]
        environment = {**agl_plugins.environment, "AGL_SECRET": "x" * 32, "XDG_STATE_HOME": str(tmp_path / "state")}
        environment |= {"OPENAI_API_KEY": "sk-somebody", "AGL_STORE": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def experiment(tmp_path: Path, store_url: str) -> Iterator[Path]:
    """Write an experiment file with the store's URL and a scripted model."""
    (tmp_path / "toy_agent.py").write_text(AGENT)
    tasks = [{"question": f"what is {n}?", "answer": str(n)} for n in range(7)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def answer_of(request) -> Reply:
        return Reply(text=request.body["messages"][0]["content"].removeprefix("what is ").removesuffix("?"))

    with ScriptedModelServer(respond=answer_of) as model:
        file = tmp_path / "experiment.toml"
        file.write_text(f"""
[experiment]
name = "toy"
agent = "toy_agent:solve"
store = "{store_url}"
train = "train.jsonl"
hidden = ["answer"]

[runner]
use = "async"
concurrency = 3

[policy.main]
use = "served"
base_url = "{model.base_url}"

[[algorithm]]
use = "counter"
tunes = "main"
params = {{ steps = {STEPS} }}

[[reward]]
use = "exact-match"
""")
        yield file


def ended(process: "subprocess.Popen[str]", *, limit_s: float = 120) -> str:
    """Return a command's output after checking that it succeeded and showed no password."""
    out, err = process.communicate(timeout=limit_s)
    assert 0 == process.returncode, out + err
    assert SECRET not in out + err
    return out


def test_killed_experiment_resumes_and_trains_every_rollout_once(agl: Start, experiment: Path, store_url: str) -> None:
    draw = random.Random(5)
    resume: tuple[str, ...] = ()
    for _ in range(2):
        process = agl("run", str(experiment), "--quiet", *resume)
        wait_for_a_step(store_url, process)
        time.sleep(draw.uniform(0.0, 0.8))
        assert process.poll() is None
        process.kill()
        _, err = process.communicate()
        assert SECRET not in err
        resume = ("--resume",)
    ended(agl("run", str(experiment), "--quiet", "--resume"))

    async def check() -> list[str]:
        store = PostgresStore(store_url)
        saved = await load_experiment(store, "toy")
        assert saved is not None
        assert "finished" == saved.status
        trained = await trained_rollouts(store, "toy", 1, "counter")
        rollouts = await store.rollouts(RolloutQuery(experiment="toy", limit=10_000))
        assert trained == {rollout.rollout_id for rollout in rollouts}
        assert STEPS * ROLLOUTS_PER_STEP == len(trained)
        assert {"succeeded"} == {rollout.status for rollout in rollouts}
        metrics = await store.metrics("toy", name="sum")
        assert float(len(trained)) == metrics[-1].value
        await store.close()
        return sorted(trained)

    trained = asyncio.run(check())
    read_with_every_command(store_url, trained)


def test_second_trainer_from_another_folder_is_refused(agl: Start, experiment: Path, store_url: str) -> None:
    first = agl("run", str(experiment), "--quiet", "--set", "algorithm.counter.params.steps=500")
    wait_for_a_step(store_url, first)
    _, err = agl("run", str(copy_of(experiment)), "--quiet", "--resume").communicate(timeout=60)
    assert first.poll() is None
    assert f"experiment 'toy' runs already, by process {first.pid} on {socket.gethostname()!r} (folder " in err
    assert "Traceback" not in err


@pytest.mark.soak
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process for a while")
def test_trainer_that_stood_still_is_replaced_and_saves_nothing_more(
    agl: Start, experiment: Path, store_url: str
) -> None:
    stopped = agl("run", str(experiment), "--quiet", "--set", "algorithm.counter.params.steps=500")
    wait_for_a_step(store_url, stopped)
    stopped.send_signal(signal.SIGSTOP)
    second = agl("run", str(copy_of(experiment)), "--quiet", "--resume")
    wait_for_a_step(store_url, second)
    stopped.send_signal(signal.SIGCONT)
    _, err = stopped.communicate(timeout=30)
    assert 1 == stopped.returncode
    assert f"experiment 'toy' was taken over by process {second.pid}" in err
    assert "Traceback" not in err
    ended(second)


def copy_of(experiment: Path) -> Path:
    """Copy the experiment into another folder."""
    folder = experiment.parent / "another"
    folder.mkdir()
    for name in (experiment.name, "toy_agent.py", "train.jsonl"):
        shutil.copy(experiment.parent / name, folder)
    return folder / experiment.name


def test_trainer_and_worker_share_the_store_and_outlive_a_restart_of_its_server(
    agl: Start, experiment: Path, store_url: str, server
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with experiment.open("a") as file:
        file.write(f"[gateway]\nparams = {{ port = {port} }}\n")
    helping = agl("worker", str(experiment), "--quiet")
    training = agl("run", str(experiment), "--quiet", "--set", "runner.concurrency=1")
    wait_for_a_step(store_url, training)
    server.kill()
    server.start()
    wait_for_a_step(store_url, training)
    assert helping.poll() is None, helping.communicate()
    ended(training)
    ended(helping)

    async def check() -> None:
        store = PostgresStore(store_url)
        rollouts = await store.rollouts(RolloutQuery(experiment="toy", limit=10_000))
        assert {"succeeded"} == {rollout.status for rollout in rollouts}
        assert STEPS * ROLLOUTS_PER_STEP == len(rollouts)
        workers = {attempt.worker for each in rollouts for attempt in await store.attempts(each.rollout_id)}
        assert 2 == len(workers), workers
        await store.close()

    asyncio.run(check())


def read_with_every_command(store_url: str, trained: list[str]) -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(cli, [*words, "--store", store_url])
        assert 0 == done.exit_code, done.output
        assert SECRET not in done.output
        return done.stdout

    listed = json.loads(said("runs", "--limit", "1000", "--json"))
    assert len(trained) == len(listed)
    assert trained[0] in said("show", trained[0])
    exported = said("data", "export", *trained[:2]).splitlines()
    assert len(exported) >= 2
    said("why", trained[0])
    said("runs", "gc", "--keep", "10")
    left = json.loads(said("runs", "--limit", "1000", "--json"))
    assert 10 == len(left)


def wait_for_a_step(store_url: str, process: "subprocess.Popen[str]") -> None:
    """Wait until the experiment finishes another step."""

    async def wait() -> None:
        store = PostgresStore(store_url)
        async with asyncio.timeout(60):
            while True:
                cursor = await store.cursor()
                seen = await store.changes(after=cursor, wait_s=5)
                assert process.poll() is None, process.communicate()
                if any(change.kind == "resource" for change in seen):
                    break
        await store.close()

    asyncio.run(wait())


def test_served_store_is_reached_over_http_and_directly(agl: Start, store_url: str, tmp_path: Path) -> None:
    """Start ``agl serve``, record a command through it, and read the record directly from the database."""
    os.environ["AGL_TOKEN"] = "t" * 32
    try:
        serving = agl("serve", "--store", store_url, "--port", "0")
        assert serving.stdout is not None
        first = serving.stdout.readline()
        assert SECRET not in first
        address = first.split()[-1]
        with urllib.request.urlopen(f"{address}/healthz", timeout=10) as answer:
            assert 200 == answer.status
        ended(agl("exec", "--store", address, "--", sys.executable, "-c", "print('done')"))
    finally:
        del os.environ["AGL_TOKEN"]

    async def check() -> None:
        store = PostgresStore(store_url)
        (rollout,) = await store.rollouts(RolloutQuery())
        assert "succeeded" == rollout.status
        await store.close()

    asyncio.run(check())
    serving.terminate()
    rest, err = serving.communicate(timeout=30)
    assert SECRET not in rest + err
