"""Algorithms side by side: every validation that is due runs once, a collapse is seen, and a kill loses nothing."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.schemas import PromptTemplate
from agl_run import FitResult, Quiet
from agl_testing.plugins import PluginFolder

TASKS = 20

PLUGIN = '''
import asyncio

import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm


class Paced(ToyAlgorithm):
    """Publishes a text with each step, which takes its time; `collects` runs the agent before."""

    def __init__(self, *, texts, pause_s=0.0, collects=False):
        self._texts, self._pause_s, self._collects, self._step = texts, pause_s, collects, 0

    async def step(self):
        context, self._step = self._context, self._step + 1
        await asyncio.sleep(self._pause_s)
        episodes = (await context.collect(context.train, step=self._step)).episodes if self._collects else ()
        text = PromptTemplate(template=self._texts[self._step - 1])
        await context.publish(context.tunes[0], text, step=self._step)
        is_finished = self._step == len(self._texts)
        return StepReport(
            step=self._step,
            is_finished=is_finished,
            metrics={"silent_share": 1.0, "reward": 0.0},  # which is told and kept as an alert after a few steps
            trained=tuple(episode.rollout.rollout_id for episode in episodes),
            stop_reason="all texts are published" if is_finished else "",
        )


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="paced", factory=Paced, tunes=("prompt_template",), needs_token_ids=False)
'''


class Lines(Quiet):
    """Keeps the lines that a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def solve(task: int, prompt: PromptTemplate) -> float:
    """Solve the first tasks, as many as the prompt's share says."""
    return float(task < float(prompt.template) * TASKS)


@pytest.fixture
def fit(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FitResult]:
    """Run an experiment with two algorithms side by side; the first one's texts decide the reward."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    agl_plugins.install(PLUGIN, name="pace")

    def run(
        texts: list[str],
        *,
        progress: Lines,
        pauses: tuple[float, float] = (0.0, 0.0),
        tasks: int = TASKS,
        **section: Any,
    ) -> FitResult:
        own = {"texts": texts, "pause_s": pauses[0]}
        other = {"texts": [str(number) for number in range(len(texts))], "pause_s": pauses[1]}
        trainer = agl.Trainer(
            name="paces",
            algorithm=[
                algorithm("paced", name="a", tunes="prompt", **own),
                algorithm("paced", name="b", tunes="other", **other),
            ],
            initial_resources={"prompt": PromptTemplate(template="0.95"), "other": PromptTemplate(template="")},
            store=f"sqlite:///{tmp_path}/runs.db",
            folder=tmp_path,
            progress=progress,
            schedule="concurrent",
            **section,
        )
        return trainer.fit(solve, [0], list(range(tasks)))

    return run


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pauses", [(0.0, 0.0), (0.01, 0.013)], ids=["at once", "in turns"])
@pytest.mark.parametrize("every", [1, 3])
def test_every_validation_that_is_due_runs_once(
    every: int, pauses: tuple[float, float], fit: Callable[..., FitResult]
) -> None:
    progress = Lines()
    result = fit(["0.95"] * 20, progress=progress, pauses=pauses, tasks=2, validate_every=every, final="last")
    assert {"a": 20, "b": 20} == result.steps
    words = "validation reward after step "
    done = [int(line.removeprefix(words).split(":")[0]) for line in progress.lines if line.startswith(words)]
    assert [0, *range(every, 40, every), 40] == done


def test_collapse_stops_algorithms_side_by_side(fit: Callable[..., FitResult]) -> None:
    progress = Lines()
    result = fit(["0.05"] * 30, progress=progress, pauses=(0.01, 0.01), validate_every=4, on_collapse="stop")
    assert 60 > sum(result.steps.values())
    (told,) = [line for line in progress.lines if "the run stops" in line and "twice in a row" in line]
    assert "0.950 before the first step" in told


SCRIPT = """
import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import agl
import agl_run
from agl.algorithms import algorithm
from agl.schemas import PromptTemplate, Rollout


async def solve(task: int, prompt: PromptTemplate, other: PromptTemplate, rollout: Rollout) -> float:
    if rollout.metadata["algorithm"] == "a" and not is_resumed:
        while rollout.metadata["step"] == 1:  # the first step of this algorithm does not end before the kill
            await asyncio.sleep(0.01)
    return 1.0


class Deadly(agl_run.Quiet):
    def say(self, text):
        if text.startswith("b step 3") and not is_resumed:
            os.kill(os.getpid(), signal.SIGKILL)


is_resumed = Path("runs.db").exists()
texts = [str(number) for number in range(4)]
result = agl.Trainer(
    name="paces",
    algorithm=[
        algorithm("paced", name=name, tunes=tunes, texts=texts, collects=True, pause_s=0.05)
        for name, tunes in (("a", "prompt"), ("b", "other"))
    ],
    initial_resources={"prompt": PromptTemplate(template="p"), "other": PromptTemplate(template="o")},
    store="sqlite:///runs.db",
    schedule="concurrent",
    progress=Deadly(),
    runner=agl_run.runner("async", concurrency=8),
).fit(solve, [0, 1], resume=is_resumed)
print(result.steps, result.resources)
"""


def test_step_that_was_killed_goes_on_though_the_other_algorithm_has_published(
    fit: Callable[..., FitResult], agl_plugins: PluginFolder, tmp_path: Path
) -> None:
    del fit  # only its plugin
    (tmp_path / "script.py").write_text(SCRIPT)

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "script.py"]
        return subprocess.run(command, cwd=tmp_path, env=agl_plugins.environment, capture_output=True, text=True)

    assert -signal.SIGKILL == run().returncode
    done = run()
    assert 0 == done.returncode, done.stderr
    assert "{'a': 4, 'b': 4} {'prompt': 'paces-1-a-4', 'other': 'paces-1-b-4'}" == done.stdout.strip()
