"""An algorithm tries versions that are not live, in several requests of one step at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.errors import ConfigError
from agl.schemas import PromptTemplate, Rollout
from agl_run import Quiet
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import asyncio
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm

LOG = []


class Chooser(ToyAlgorithm):
    """Tries two prompts at once on the same tasks, and says what each of them got."""

    def __init__(self, *, key="", name="prompt", endpoint=""):
        self._key, self._name, self._endpoint = key, name, endpoint

    async def setup(self, context):
        self._context = context
        if self._endpoint:
            LOG.append(context.endpoint(self._endpoint))

    async def step(self):
        context = self._context

        async def attempt(text):
            version = await context.propose(self._name, PromptTemplate(template=text), step=1, key=text)
            collected = await context.collect(
                context.train, step=1, resources={"prompt": version.version}, key=self._key or text, keeps_all=True
            )
            return version, collected

        LOG.extend(await asyncio.gather(attempt("good"), attempt("bad")))
        LOG.append(dict(context.live()))
        context.say("chosen")
        return StepReport(step=1, is_finished=True, stop_reason="done")


class Breaker(ToyAlgorithm):
    """Publishes, then breaks in the step after it, once."""

    is_whole = False

    async def setup(self, context):
        self._context, self._step = context, 0

    async def step(self):
        self._step += 1
        if self._step == 2 and not Breaker.is_whole:
            Breaker.is_whole = True
            raise RuntimeError("broke")
        await self._context.publish("prompt", PromptTemplate(template="good"), step=self._step)
        return StepReport(step=self._step, is_finished=self._step == 2)


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="breaker", factory=Breaker, tunes=("prompt_template",), needs_token_ids=False)
    yield agl.AlgorithmEntry(name="chooser", factory=Chooser, tunes=("prompt_template",), needs_token_ids=False)
'''


@pytest.fixture
def fit(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs the chooser; returns what it logged."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log: list[Any] = __import__(agl_plugins.install(PLUGIN, name="choosing")).LOG

    def run(*, progress: Any = None, **params: Any) -> list[Any]:
        log.clear()
        agl.Trainer(
            algorithm=algorithm("chooser", params, tunes="prompt"),
            initial_resources={"prompt": PromptTemplate(template="first"), "fixed": PromptTemplate(template="f")},
            store="memory://",
            folder=tmp_path,
            progress=progress or Quiet(),
        ).fit(solve, train_dataset=["a", "b", "mute"])
        return log

    return run


async def solve(task: str, resources: Any, rollout: Rollout) -> float | None:
    if resources["prompt"].template == "bad" and task == "b":
        raise ValueError("no")
    return None if task == "mute" else float(resources["prompt"].template == "good")


def test_candidates_are_run_and_do_not_become_live(fit: Callable[..., list[Any]]) -> None:
    (good, of_good), (bad, of_bad), live = fit()

    assert ("experiment-1-chooser-1-good", "experiment-1-initial") == (good.version, good.parent)
    assert {"candidate": True} == bad.metadata
    assert {"prompt": "experiment-1-initial", "fixed": "experiment-1-initial"} == live
    assert [1.0, 1.0, None] == [episode.reward for episode in of_good.episodes]
    assert ["succeeded", "failed", "succeeded"] == [episode.rollout.status for episode in of_bad.episodes]
    assert {good.version} == {episode.rollout.resources["prompt"] for episode in of_good.episodes}
    ids = [episode.rollout.rollout_id for episode in (*of_good.episodes, *of_bad.episodes)]
    assert "experiment-1-chooser-train-00001-good-00000-000" == ids[0]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"key": "a/b"}, "'a/b' may hold letters"),
        ({"name": "fixed"}, "may not publish 'fixed'"),
        ({"endpoint": "nobody"}, "there is no policy 'nobody'"),
    ],
)
def test_wrong_names_are_refused(fit: Callable[..., list[Any]], params: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(**params)


def test_run_that_is_resumed_after_a_publication_keeps_its_first_validation(
    agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    agl_plugins.install(PLUGIN, name="choosing")
    trainer = agl.Trainer(
        algorithm=algorithm("breaker", tunes="prompt"),
        initial_resources={"prompt": PromptTemplate(template="first")},
        store="sqlite:///runs.db",
        folder=tmp_path,
        progress=Quiet(),
    )
    with pytest.raises(RuntimeError, match="broke"):
        trainer.fit(solve, train_dataset=["a"], val_dataset=["b", "c"])
    result = trainer.fit(solve, train_dataset=["a"], val_dataset=["b", "c"], resume=True)
    assert (0.0, 1.0) == (result.before, result.after)


def test_algorithm_can_say_a_line(fit: Callable[..., list[Any]]) -> None:
    class Listening(Quiet):
        said: list[str] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    progress = Listening()
    fit(progress=progress)
    assert "chooser: chosen" in progress.said
