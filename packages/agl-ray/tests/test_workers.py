"""Experiments whose attempts run in workers on a Ray cluster."""

import os
from pathlib import Path
from typing import Any

import pytest

from agl_run import FitResult, Quiet, Trainer, load_config
from agl_testing.experiments import write_experiment
from agl_testing.model_server import ScriptedModelServer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own sockets

RAY = '[runner]\nuse = "ray"\nconcurrency = 2\n\n[runner.params]\nmax_workers = 2\n'

AGENT = """
import os
import openai


async def solve(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        messages = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
    with open("SEEN", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return float(answer.choices[0].message.content == "4")
"""


def _experiment(folder: Path, model: ScriptedModelServer, *, tasks: int, more: str) -> tuple[Path, Path]:
    """Write an experiment whose agent notes its process; returns its file, and that of the processes."""
    seen = folder / "seen"
    seen.touch()
    train = [{"question": f"2 + 2 at the {number}th time"} for number in range(tasks)]
    agent = AGENT.replace("SEEN", str(seen))
    return write_experiment(folder, base_url=model.base_url, agent=agent, train=train, val=train[:1], more=more), seen


def _fit(file: Path) -> FitResult:
    return Trainer.from_config(load_config(file), folder=file.parent, progress=Quiet()).fit()


def test_attempts_run_in_workers(ray: Any, model: ScriptedModelServer, tmp_path: Path) -> None:
    file, seen = _experiment(tmp_path, model, tasks=6, more=RAY)
    result = _fit(file)
    processes = seen.read_text().split()
    assert (0, 1.0) == (result.failed, result.after)
    assert len(processes) >= 7
    assert str(os.getpid()) not in processes
