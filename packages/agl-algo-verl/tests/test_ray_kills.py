"""VERL on a real Ray cluster, with `kill -9` of the processes around its trainer in the middle of a step.

In one run of three steps, the first kills a process of the runner and then the store and gateway of `agl serve`, the
second the serving replica, and the third VERL's training worker. Nothing is trained twice or left out.
Other runs are killed as a whole while steps wait to be saved.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from agl.contracts import RolloutQuery
from agl_inspect.records.state import trained_rollouts
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
pytest.importorskip("agl_gateway", reason="needs agl-gateway, which is killed")
pytest.importorskip("openai", reason="needs openai, which the agent calls with")

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

PATIENCE_S = 1200
"""Timeout in seconds for a busy machine."""

STEPS, ROLLOUTS_PER_STEP = 3, 8

AGENT = """
import os
import time
from pathlib import Path

import openai

import agl


def solve(task, llm):
    capture = agl.current()
    with Path("started.txt").open("a") as file:
        file.write(f"{capture.rollout_id} {os.getpid()}\\n")
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none", max_retries=0) as client:
        for _ in range(2):
            time.sleep(1.0)
            messages = [{"role": "user", "content": task["text"]}]
            answer = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
    return len(answer.choices[0].message.content or "") % 3 / 2
"""

EXPERIMENT = """
[experiment]
name = "kills"
agent = "agent:solve"
store = "{store}"
train = "tasks.jsonl"
workdir = "run"

[runner]
use = "process"
concurrency = 4
timeout_s = 300
retry_on = ["failed"]

[policy.llm]
use = "verl"
model = "{model}"
threads = 1

[[algorithm]]
use = "verl"
tunes = "llm"

[algorithm.params]
engine = "ray"
threads = 1
algorithm.adv_estimator = "grpo"
data.train_batch_size = 2
actor_rollout_ref.rollout.name = "agl_hf"
actor_rollout_ref.rollout.n = 4
actor_rollout_ref.actor.optim.lr = 1e-3
trainer.total_training_steps = {steps}
saving.save_every = {save_every}
"""


class Stage:
    """An experiment's folder, its served store, and its runs."""

    def __init__(self, folder: Path, model: Path, *, steps: int = STEPS, save_every: int = 1) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.folder = folder
        token = {"AGL_TOKEN": "an-admin-token-for-a-test", "AGL_SECRET": "x" * 32}
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0", **token}
        url = f"http://127.0.0.1:{self.port}"
        (folder / "agent.py").write_text(AGENT)
        (folder / "tasks.jsonl").write_text("".join(json.dumps({"text": f"task {i}"}) + "\n" for i in range(4)))
        (folder / "experiment.toml").write_text(
            EXPERIMENT.format(store=url, model=model, steps=steps, save_every=save_every)
        )

    def start(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "agl", *words],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )

    def serve(self) -> subprocess.Popen[bytes]:
        """Start a server of the store; returns its process once it answers."""
        server = self.start("serve", "--store", "sqlite:///runs.db", "--port", str(self.port), log="serve.txt")
        wait_for(lambda: self._answers(), server)
        return server

    @contextmanager
    def running(self, *words: str) -> Generator[subprocess.Popen[bytes]]:
        """Start a run with a separate log; if the test fails, the run and its processes are killed."""
        (self.folder / "log.txt").unlink(missing_ok=True)
        process = self.start("run", "experiment.toml", *words, log="log.txt")
        try:
            yield process
        except BaseException:
            print(self.log())
            raise
        finally:
            left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            for one in left:
                if one.is_running():
                    one.kill()

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def attempts(self, step: int) -> list[int]:
        """Return the processes of a step's attempts that have begun, in order."""
        file = self.folder / "started.txt"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [int(line.split()[1]) for line in lines if f"-train-{step:05d}-" in line]

    def kill_in_step(self, step: int, run: subprocess.Popen[bytes], name: str) -> None:
        """Kill one of a run's processes in the middle of a step; checks that the run ends and says how to continue."""
        wait_for(lambda: bool(self.attempts(step)), run)
        kill(run, name)
        assert 0 != run.wait(PATIENCE_S)
        assert "continue with --resume (resume=True)" in self.log()
        assert "Traceback" not in self.log()

    def _answers(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5):
                return True
        except (URLError, OSError):
            return False


def wait_for(what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    def holds() -> bool:
        assert process.poll() is None
        return what()

    wait_until(holds, within_s=PATIENCE_S, every_s=0.1)


def kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a descendant of a run's process, found by its name or a word of its command."""
    found = [
        p for p in psutil.Process(process.pid).children(recursive=True) if mark in " ".join([p.name(), *p.cmdline()])
    ]
    assert found, mark
    found[0].send_signal(signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="VERL runs on Linux and macOS")
@pytest.mark.soak
def test_whatever_is_killed_in_the_middle_of_a_step_nothing_is_trained_twice(model_dir: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path, model_dir)
    server = stage.serve()
    try:
        with stage.running() as run:
            wait_for(lambda: bool(stage.attempts(1)), run)
            os.kill(stage.attempts(1)[-1], signal.SIGKILL)
            wait_for(lambda: len(stage.attempts(1)) > ROLLOUTS_PER_STEP // 2, run)
            server.kill()
            server.wait()
            server = stage.serve()
            stage.kill_in_step(2, run, "ray::HFServer")
        assert len(stage.attempts(1)) > ROLLOUTS_PER_STEP
        with stage.running("--resume") as run:
            stage.kill_in_step(3, run, "ray::WorkerDict")
        with stage.running("--resume") as run:
            assert 0 == run.wait(PATIENCE_S), stage.log()
    finally:
        server.kill()
        server.wait()

    asyncio.run(check_ledger(tmp_path, steps=STEPS))


async def check_ledger(folder: Path, *, steps: int) -> None:
    """Check that every rollout has succeeded and was trained in exactly one step, and that each step logged once."""
    store = SQLiteStore(f"sqlite:///{folder / 'runs.db'}")
    try:
        rollouts = await store.rollouts(RolloutQuery(experiment="kills", mode="train", limit=1000))
        assert {"succeeded"} == {rollout.status for rollout in rollouts}
        assert steps * ROLLOUTS_PER_STEP == len(rollouts)
        assert {rollout.rollout_id for rollout in rollouts} == await trained_rollouts(store, "kills", 1, "verl")
        ledger = await store.trained("kills", run=1, algorithm="verl")
        assert dict.fromkeys(range(1, steps + 1), ROLLOUTS_PER_STEP) == Counter(ledger.values())
        metrics = await store.metrics("kills")
        assert list(range(1, steps + 1)) == sorted(metric.step for metric in metrics if metric.name == "reward")
        assert any(metric.name == "loss" for metric in metrics), "every step was silent"
    finally:
        await store.close()


@pytest.mark.skipif(sys.platform == "win32", reason="VERL runs on Linux and macOS")
@pytest.mark.soak
@pytest.mark.parametrize("kills", [1, 20])
def test_steps_that_wait_to_be_saved_are_repeated_from_their_rollouts_after_a_kill(
    model_dir: Path, tmp_path: Path, kills: int
) -> None:
    steps = kills + 3
    stage = Stage(tmp_path, model_dir, steps=steps, save_every=3)
    server = stage.serve()
    try:
        for kill_number in range(kills):
            with stage.running(*(["--resume"] if kill_number else [])) as run:
                step = kill_number + 3  # those since the last multiple of 3 are not saved
                wait_for(lambda step=step: bool(stage.attempts(step)), run)
                left = psutil.Process(run.pid).children(recursive=True)
                run.send_signal(signal.SIGKILL)
                run.wait()
                wait_until(lambda left=left: not any(map(is_left, left)), within_s=PATIENCE_S, every_s=0.2)
        begun = len(stage.attempts(1)) + len(stage.attempts(2))
        with stage.running("--resume") as run:
            assert 0 == run.wait(PATIENCE_S), stage.log()
        assert begun == len(stage.attempts(1)) + len(stage.attempts(2)), "the steps were repeated without a rollout"
    finally:
        server.kill()
        server.wait()
    asyncio.run(check_ledger(tmp_path, steps=steps))


def is_left(one: psutil.Process) -> bool:
    """Return true if the process still exists and is not a zombie."""
    try:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
