"""Runs an experiment for tests of sinks, with algorithms that publish a prompt in each step, and may hang or fail.

run(folder, "mlflow", {}, left={"steps": 3}, right={"steps": 2})
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import agl
from agl.algorithms import algorithm as config_of
from agl.algorithms import component
from agl.contracts import AlgorithmContext, AlgorithmEntry, Metric, StepReport
from agl.schemas import Json, PromptTemplate
from agl.stores import MemoryStore
from agl_run import FitResult, Quiet
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

HELD = "held"
"""Name of the file that an algorithm creates when it reaches the step at which it waits to be killed."""

_PROGRAM = "import json, sys\nfrom agl_testing.sink_world import run\nrun(**json.loads(sys.argv[1]))"


_HINT = re.compile(r"Hint \d\.")
_HINTS = 4


class Counting:
    """An algorithm that publishes a prompt in each step, and records it as a candidate, as a prompt search does.

    Args:
        steps: Total number of steps.
        hold_at: The step in which it waits forever, unless the file :data:`HELD` exists; 0 for no step.
        fail_at: The step in which it raises an error; 0 for no step.
        text: The text of its prompts, to which the step's number is added.
        metrics: Further metrics of each step.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        hold_at: int = 0,
        fail_at: int = 0,
        text: str = "count",
        metrics: dict[str, float] | None = None,
    ) -> None:
        self._steps, self._hold_at, self._fail_at, self._text = steps, hold_at, fail_at, text
        self._metrics = metrics or {}
        self._step = 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Store the context."""
        self._context = context

    async def step(self) -> StepReport:
        """Collect a rollout and publish a prompt, unless this is the step to wait or fail at."""
        step, context = self._step + 1, self._context
        held = context.folder / HELD
        if step == self._hold_at and not held.exists():
            held.touch()
            await asyncio.Event().wait()
        if step == self._fail_at:
            raise ZeroDivisionError("this step fails")
        await context.collect(context.train[:1], step=step)
        for name in context.tunes:
            await context.publish(name, PromptTemplate(template=f"{self._text} {step}"), step=step)
        self._step = step
        return StepReport(
            step=step, is_finished=step == self._steps, metrics={"score": step / 8, "cost": 1.0 / step, **self._metrics}
        )

    def state(self) -> Mapping[str, Json]:
        """Return the number of the last step, and the candidates in the form of a prompt search's state."""
        every = range(self._step + 1)
        parents = {n: {"parents": [f"c{n - 1}"], "operator": "edit"} for n in every[1:]}
        lineage: list[Json] = [
            {"id": f"c{n}", "texts": {"p": f"{self._text} {n}"}, "step": n, "status": "pool", **parents.get(n, {})}
            for n in every
        ]
        score = {"low": 0.0, "high": 1.0, "n": 4}
        journal = {f"c{n}": {"scores": {"validation tasks": {**score, "mean": n / 8}}} for n in every}
        return {"step": self._step, "lineage": lineage, "journal": journal}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue after the step whose number is in ``state``."""
        self._step = int(state["step"])

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _Plugin:
    @agl.hookimpl
    def agl_algorithms(self) -> Iterable[AlgorithmEntry]:
        yield AlgorithmEntry(name="counting", factory=Counting, tunes=("prompt_template",), needs_token_ids=False)


def run(folder: str, use: str, params: Mapping[str, Any], *, resume: bool = False, **counting: Any) -> FitResult:
    """Run the experiment ``small`` with a sink and with one :class:`Counting` algorithm for each keyword argument.

    Args:
        folder: The folder for the experiment, the store and the work directory.
        use: The sink's registered name.
        params: The sink's parameters.
        resume: Resume the earlier run.
        counting: The parameters of each algorithm, by its name; algorithm ``NAME`` tunes the prompt ``NAME_prompt``.
    """
    manager = agl.PluginManager.from_environment()
    manager.register(_Plugin(), name="sink-world")
    prompts = {name: f"{name}_prompt" for name in counting}
    trainer = agl.Trainer(
        algorithm=[config_of("counting", name=name, tunes=prompts[name], **own) for name, own in counting.items()],
        name="small",
        store=f"sqlite:///{folder}/runs.db",
        workdir=f"{folder}/work",
        folder=folder,
        initial_resources={prompt: PromptTemplate(template="count 0") for prompt in prompts.values()},
        schedule="alternate",
        exporters=component(use, **params),
        plugins=manager,
        progress=Quiet(),
    )
    return trainer.fit(_solve, [{"n": 1}], [{"n": 2}], resume=resume)


def started(folder: Path, use: str, params: Mapping[str, Any], **counting: Any) -> "subprocess.Popen[str]":
    """Start :func:`run` in a separate process."""
    arguments = {"folder": str(folder), "use": use, "params": params, **counting}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, json.dumps(arguments)], text=True)


def search(folder: str, use: str, params: Mapping[str, Any], *, algorithm: str, budget: int = 120) -> list[Metric]:
    """Run a prompt search of ``agl-algo-apo`` with a sink, and return the metrics that it logged.

    A prompt scores 0.25 for each of four hints in it. Every answer of the optimiser's model adds one hint.

    Args:
        folder: The folder for the experiment ``small`` and its work directory.
        use: The sink's registered name.
        params: The sink's parameters.
        algorithm: The search, such as ``apo`` or ``gepa``.
        budget: Largest number of rollouts of the search.
    """
    store = MemoryStore("memory://")
    with ScriptedModelServer(respond=_with_a_hint) as server:
        endpoint = {"base_url": server.base_url, "model": "editor", "retry_s": 0.01, "wait_s": 0.2}
        trainer = agl.Trainer(
            algorithm=config_of(algorithm, tunes="prompt", optimizer=endpoint, budget=budget),
            name="small",
            store=store,
            initial_resources={"prompt": PromptTemplate(template="Complete the order.\n{order}")},
            folder=folder,
            workdir=f"{folder}/work",
            exporters=component(use, **params),
            progress=Quiet(),
        )
        trainer.fit(_follow, [{"order": f"train-{n}"} for n in range(16)], [{"order": f"val-{n}"} for n in range(16)])
    return asyncio.run(store.metrics("small"))


def _follow(task: dict[str, str], prompt: PromptTemplate) -> float:
    return len(set(_HINT.findall(prompt.format(**task)))) / _HINTS


def _with_a_hint(request: ModelRequest) -> Reply:
    """Return the prompt from the request with one more hint, in the format that the request asks for."""
    text = "\n\n".join(turn.text for turn in request.turns)
    held = set(_HINT.findall(text))
    hints = [f"Hint {n}." for n in range(min(len(held) + 1, _HINTS))]
    prompt = "\n".join(["Complete the order.", *hints, "{order}"])
    wanted = re.search(r"between <(\w+)> and </\1>", text)
    return Reply(text=f"<{wanted[1]}>\n{prompt}\n</{wanted[1]}>" if wanted else f"```\n{prompt}\n```")


def _solve(task: dict[str, int]) -> float:
    return task["n"] / 2
