"""A whole experiment with the programs ``agl tinker serve`` and ``agl run``, both killed with ``kill -9``."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl.contracts import RolloutQuery
from agl_inspect.records.state import load_algorithm, trained_rollouts
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import PATIENCE_S, wait_until

from .world import KEY

AGENT = '''
import json
import urllib.request


def solve(task, llm):
    """Ask for a few characters, and reward small letters and digits of any kind."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": task["text"]}], "max_tokens": 6}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    return sum(letter.isascii() for letter in text) / max(1, len(text))
'''
EXPERIMENT = """
[experiment]
name = "letters"
agent = "letters_agent:solve"
store = "sqlite:///runs.db"
train = "tasks.jsonl"

[runner]
use = "async"
concurrency = 4

[policy.main_llm]
use = "tinker"
model = "{model}"
base_url = "{url}"

[[algorithm]]
use = "tinker"
tunes = "main_llm"

[algorithm.params]
steps = {steps}
tasks_per_step = 2
group_size = 4
lora_rank = 4
optim = {{ lr = 0.01 }}
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return `start("run", ...)`, which starts a command of agl as a process."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str, cwd: Path, errors: Path | None = None) -> "subprocess.Popen[str]":
        environment = {**os.environ, "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(cwd)}
        with (errors or cwd / "output").open("w") as output:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "agl", *words],
                    cwd=cwd,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    text=True,
                )
            )
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


def url_of(log: Path, process: "subprocess.Popen[str]") -> str:
    def found() -> str:
        assert process.poll() is None, log.read_text()
        match = re.search(r"TINKER_BASE_URL=(\S+) and", log.read_text())
        return match[1] if match else ""

    return wait_until(found)


def steps_done(folder: Path) -> int:
    async def read() -> int:
        store = SQLiteStore(f"sqlite:///{folder / 'runs.db'}")
        state = await load_algorithm(store, "letters", 1, "tinker")
        await store.close()
        return int(state.state["step"]) if state is not None and state.state else 0

    return asyncio.run(read()) if (folder / "runs.db").exists() else 0


def test_killed_trainer_and_killed_server_train_every_rollout_once(
    start: Start, model_dir: Path, tmp_path: Path
) -> None:
    log, steps = tmp_path / "server.log", 6
    words = ("tinker", "serve", str(model_dir), "--folder", str(tmp_path / "checkpoints"), "--threads", "1")
    server = start(*words, "--port", "0", cwd=tmp_path, errors=log)
    url = url_of(log, server)
    (tmp_path / "letters_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n{"text": "d"}\n')
    file = tmp_path / "experiment.toml"
    file.write_text(EXPERIMENT.format(model=model_dir, url=url, steps=steps))
    trainer = start("run", str(file), "--quiet", cwd=tmp_path)
    wait_until(lambda: steps_done(tmp_path) >= 2 or trainer.poll() is not None, every_s=0.1)
    trainer.kill()
    trainer.wait()
    done = steps_done(tmp_path)
    assert 2 <= done < steps, (tmp_path / "output").read_text()
    server.kill()
    server.wait()
    again = start(*words, "--port", url.rpartition(":")[2], cwd=tmp_path, errors=log)
    assert url == url_of(log, again)
    resumed = start("run", str(file), "--quiet", "--resume", cwd=tmp_path)
    assert 0 == resumed.wait(PATIENCE_S), (tmp_path / "output").read_text()
    assert steps == steps_done(tmp_path)

    async def check() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")
        trained = await trained_rollouts(store, "letters", 1, "tinker")
        rollouts = await store.rollouts(RolloutQuery(experiment="letters", limit=1000))
        assert steps * 8 == len(trained)
        assert {one.rollout_id for one in rollouts} == trained
        calls = [span.call for one in rollouts for span in await store.spans(one.rollout_id) if span.call is not None]
        assert all(call.response_ids and call.logprobs for call in calls)
        versions = {call.model_version for call in calls}
        assert steps == len(versions), "every step samples with the weights of the one before it"
        await store.close()

    asyncio.run(check())
