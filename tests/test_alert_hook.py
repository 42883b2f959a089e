"""The observer of alerts: told each finding of a run once, and never in the way of the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import agl
from agl.algorithms import algorithm
from agl_run import Quiet, policy
from agl_testing.model_server import ScriptedModelServer
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import agl
from agl.contracts import StepReport
from agl_testing.toys import ToyAlgorithm

SEEN = []


class Silent(ToyAlgorithm):
    """Finishes steps that teach nothing."""

    def __init__(self, *, steps):
        self._steps, self._step = steps, 0

    async def step(self):
        self._step += 1
        await self._context.collect(self._context.train, step=self._step)
        is_finished = self._step >= self._steps
        return StepReport(step=self._step, is_finished=is_finished, metrics={"silent_share": 1.0, "reward": 0.0})

    def has_more(self, state, *, tasks, sources_go_on):
        return self._steps > state["step"]


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="silent", factory=Silent)


@agl.hookimpl
def agl_alert_raised(experiment, run, kind, rule, algorithm, step, evidence, change):
    SEEN.append((experiment, run, kind, rule, algorithm, step, evidence, change))
    raise RuntimeError("an observer that fails")
'''


def solve(task: dict[str, Any], llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "what is 1?"}])
    return 0.0


@pytest.fixture
def plugin(toy: str, agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return __import__(agl_plugins.install(PLUGIN, name="alerted"))


@pytest.fixture
def fit(plugin: Any, server: ScriptedModelServer, tmp_path: Path) -> Callable[..., Any]:
    def run(steps: int, **options: bool) -> Any:
        trainer = agl.Trainer(
            name="alerted",
            algorithm=[algorithm("silent", tunes="main", steps=steps)],
            policies={"main": policy("served", base_url=server.base_url)},
            store=f"sqlite:///{tmp_path}/runs.db",
            folder=tmp_path,
            progress=Quiet(),
        )
        return trainer.fit(solve, [{"n": 0}], **options)

    return run


def test_observer_is_told_each_finding_once_over_restarts_and_its_failure_stops_nothing(
    fit: Callable[..., Any], plugin: Any
) -> None:
    assert {"silent": 4} == fit(4).steps
    [(*place, evidence, change)] = plugin.SEEN
    assert ["alerted", 1, "suggestion", "silent-groups", "silent", 3] == place
    assert evidence.startswith("100% of the rollouts taught nothing")
    assert "easier tasks" in change

    assert {"silent": 8} == fit(8, resume=True).steps
    assert 1 == len(plugin.SEEN)

    fit(4, fresh=True)
    assert [1, 2] == [run for _, run, *_ in plugin.SEEN]
