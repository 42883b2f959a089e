"""Whole experiments replace silent groups, even after a kill, and `agl why` reports the replacement."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from agl.contracts import RolloutQuery
from agl_objectives.groups import DROPPED
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import invoke_agl

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 2

PROGRAM = """
    import os, signal, sys
    from pathlib import Path

    import openai

    import agl
    from agl.algorithms import algorithm
    from agl_run import Quiet, policy

    HERE = Path(__file__).parent


    async def write(task: dict, llm: agl.LLM, rollout: agl.Rollout) -> float:
        "Only tasks of an even number have rollouts that differ; the first one of a second step's rounds may kill all."
        if "-00002-refill" in rollout.rollout_id and (HERE / "deadly").exists():
            (HERE / "deadly").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
            said = [{"role": "user", "content": task["text"]}]
            await client.chat.completions.create(model=llm.model, messages=said, max_tokens=3)
        return float(rollout.rollout_id[-1] == "0") if task["number"] % 2 == 0 else 1.0


    settings = {"compute": {"device": "cpu", "threads": 1}, "tunes": "llm", "optim": {"lr": 1e-4}}
    trainer = agl.Trainer(
        name="refilled",
        algorithm=algorithm(
            "grpo",
            steps=STEPS,
            tasks_per_step=3,
            group_size=2,
            sampling={"refill": 9, "curriculum": "frontier"},
            **settings,
        ),
        policies={"llm": policy("torch", model=sys.argv[1], threads=1)},
        store=f"sqlite:///{HERE}/runs.db",
        n_runners=1,
        folder=HERE,
        progress=Quiet(),
    )
    tasks = [{"number": number, "text": "abcdefgh"[number]} for number in range(8)]
    trainer.fit(write, tasks, resume="resume" in sys.argv)
""".replace("STEPS", str(STEPS))


@pytest.fixture
def model_dir(make_loaded: Any, tmp_path: Path) -> Path:
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(folder: Path, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "AGL_SECRET": "x" * 32}
    command = [sys.executable, str(folder / "program.py"), str(model), *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def write_program(folder: Path) -> Path:
    folder.mkdir()
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    return folder


async def records(folder: Path) -> tuple[dict[str, int], set[str]]:
    """Return the task number of each rollout, and the ids of the rollouts that were trained."""
    store = SQLiteStore(f"sqlite:///{folder}/runs.db")
    try:
        found = await store.rollouts(RolloutQuery(experiment="refilled"))
        assert all(rollout.status == "succeeded" for rollout in found)
        trained = await store.trained("refilled", run=1, algorithm="grpo")
        return {rollout.rollout_id: rollout.task["number"] for rollout in found}, set(trained)
    finally:
        await store.close()


@pytest.mark.long
def test_a_run_killed_while_it_refills_draws_and_trains_what_an_unharmed_one_does(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = write_program(tmp_path / "whole"), write_program(tmp_path / "killed")
    done = run(whole, model_dir)
    assert 0 == done.returncode, done.stderr
    (killed / "deadly").touch()
    assert -signal.SIGKILL == run(killed, model_dir).returncode
    done = run(killed, model_dir, "resume")
    assert 0 == done.returncode, done.stderr

    tasks, trained = asyncio.run(records(whole))
    assert (tasks, trained) == asyncio.run(records(killed))
    assert any("-00002-refill" in rollout for rollout in trained)
    assert {0} == {tasks[rollout] % 2 for rollout in trained}
    silent = sorted({rollout for rollout, number in tasks.items() if number % 2})
    assert silent

    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    assert f"did not train: {DROPPED}" in invoke_agl("why", silent[0], "--store", "runs.db", folder=killed)
