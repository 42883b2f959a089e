"""Algorithms that follow each other: each is checked before all, and set up at its turn on what the one before left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.errors import ConfigError
from agl.schemas import PromptTemplate
from agl_run import Quiet
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import agl
from agl.contracts import StepReport
from agl.errors import ConfigError
from agl.schemas import PromptTemplate

LOG = []
BREAKS = []


class Appender:
    """Appends a word to the prompt in each of two steps, and notes what is done with it."""

    def __init__(self, *, word, is_bad=False):
        self._word, self._is_bad, self._step = word, is_bad, 0
        self._is_used = False

    async def check(self, context):
        self._is_used = True
        LOG.append(("check", self._word))
        if self._is_bad:
            raise ConfigError(f"{self._word} cannot work")

    async def setup(self, context):
        self._is_used = True
        self._context = context
        LOG.append(("setup", self._word, context.current("prompt").resource.template))

    async def step(self):
        self._step += 1
        if (self._word, self._step) in BREAKS:
            raise RuntimeError("broke")
        text = self._context.current("prompt").resource.template
        await self._context.publish("prompt", PromptTemplate(template=f"{text} {self._word}"), step=self._step)
        return StepReport(step=self._step, is_finished=self._step == 2)

    def state(self):
        return {"step": self._step}

    async def restore(self, state):
        self._step = state["step"]

    async def close(self):
        if self._is_used:  # one that was only built, for its parameters, has nothing to release
            LOG.append(("close", self._word))


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="appender", factory=Appender, tunes=("prompt_template",), needs_token_ids=False)
'''


@pytest.fixture
def plugin(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of the plugin."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return __import__(agl_plugins.install(PLUGIN, name="appending"))


@pytest.fixture
def fit(plugin: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs two appenders, one after the other; returns what they noted."""

    def run(*, resume: bool = False, **second: Any) -> list[Any]:
        plugin.LOG.clear()
        agl.Trainer(
            algorithm=[
                algorithm("appender", tunes="prompt", name="one", word="one"),
                algorithm("appender", tunes="prompt", name="two", **{"word": "two", **second}),
            ],
            initial_resources={"prompt": PromptTemplate(template="zero")},
            store="sqlite:///runs.db",
            folder=tmp_path,
            progress=Quiet(),
        ).fit(solve, train_dataset=["a"], val_dataset=["b"], resume=resume)
        return plugin.LOG

    return run


def solve(task: str, prompt: PromptTemplate) -> float:
    return float(len(prompt.template))


def test_later_algorithm_is_set_up_at_its_turn_on_what_the_earlier_one_published(fit: Callable[..., list[Any]]) -> None:
    assert [
        ("check", "two"),
        ("close", "two"),
        ("setup", "one", "zero"),
        ("close", "one"),
        ("setup", "two", "zero one one"),
        ("close", "two"),
    ] == fit()


def test_run_that_broke_in_a_later_turn_goes_on_there(plugin: Any, fit: Callable[..., list[Any]]) -> None:
    plugin.BREAKS.append(("two", 2))
    with pytest.raises(RuntimeError, match="broke"):
        fit()
    plugin.BREAKS.clear()
    assert [("setup", "two", "zero one one two"), ("close", "two")] == fit(resume=True)


def test_run_that_broke_in_the_first_turn_checks_the_later_one_again(
    plugin: Any, fit: Callable[..., list[Any]]
) -> None:
    plugin.BREAKS.append(("one", 2))
    with pytest.raises(RuntimeError, match="broke"):
        fit()
    plugin.BREAKS.clear()
    resumed = fit(resume=True)
    assert [("check", "two"), ("close", "two"), ("setup", "one", "zero one")] == resumed[:3]
    assert ("setup", "two", "zero one one") in resumed


@pytest.mark.parametrize(
    ("second", "message"), [({"is_bad": True}, "two cannot work"), ({"wrong": 1}, "takes no parameter 'wrong'")]
)
def test_later_algorithm_that_cannot_work_is_refused_before_anything_is_paid(
    plugin: Any, fit: Callable[..., list[Any]], second: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(**second)
    assert not [event for event in plugin.LOG if event[0] == "setup"]
