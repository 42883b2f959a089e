"""A finished experiment that is given more steps: which algorithms go on, in which order, and what is refused."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import agl
import agl_run
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.errors import ConfigError
from agl.schemas import PromptTemplate
from agl_inspect.records.state import load_experiment
from agl_inspect.records.validations import read_validations
from agl_run import Progress, Quiet
from agl_store_sqlite._store import SQLiteStore
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm


class Fixed(ToyAlgorithm):
    """Appends its word to the prompt that it tunes, once per step; breaks at a step, or with -step in its middle."""

    def __init__(self, *, steps, word, breaks_at=0):
        self._steps, self._word, self._breaks_at, self._step = steps, word, breaks_at, 0

    async def step(self):
        context, self._step = self._context, self._step + 1
        if self._step == self._breaks_at:
            raise RuntimeError("stopped on purpose")
        collected = await context.collect(context.train, step=self._step)
        if self._step == -self._breaks_at:
            raise RuntimeError("stopped on purpose")
        name = context.tunes[0]
        text = context.current(name).resource.template + self._word
        await context.publish(name, PromptTemplate(template=text), step=self._step)
        is_finished = self._step >= self._steps
        return StepReport(
            step=self._step,
            is_finished=is_finished,
            trained=tuple(episode.rollout.rollout_id for episode in collected.episodes),
            stop_reason=f"{self._step} steps done" if is_finished else "",
        )

    def state(self):
        return {"step": self._step}

    async def restore(self, state):
        self._step = state["step"]
        self._context.say("restored")


class Longer(Fixed):
    """One that can go on."""

    def has_more(self, state, *, tasks, sources_go_on):
        return state["step"] < self._steps


@agl.hookimpl
def agl_algorithms():
    for name, factory in (("fixed", Fixed), ("longer", Longer)):
        yield agl.AlgorithmEntry(name=name, factory=factory, tunes=("prompt_template",), needs_token_ids=False)
'''


def letters(task: str, prompt: PromptTemplate) -> float:
    """The length of the prompt."""
    del task
    return float(len(prompt.template))


@pytest.fixture
def fit(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """``fit(a=2, b=3, ...)`` runs an experiment of the algorithms ``a`` and ``b`` with so many steps on one prompt."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    agl_plugins.install(PLUGIN, name="learners")

    def run(
        *,
        use: str = "longer",
        resume: bool = False,
        tunes: dict[str, str] | None = None,
        breaks: dict[str, int] | None = None,
        schedule: str = "sequential",
        folder: str = "work",
        progress: Progress | None = None,
        section: dict[str, Any] | None = None,
        tasks: Sequence[str] = ("x",),
        val: Sequence[str] = ("y",),
        **steps: int,
    ) -> Any:
        algorithms = [
            algorithm(
                use,
                name=word,
                tunes=(tunes or {}).get(word, "prompt"),
                steps=count,
                word=word,
                breaks_at=(breaks or {}).get(word, 0),
            )
            for word, count in steps.items()
        ]
        names = {"prompt", *(tunes or {}).values()}
        trainer = agl.Trainer(
            name="small",
            algorithm=algorithms,
            initial_resources={name: PromptTemplate(template="") for name in names},
            store=f"sqlite:///{tmp_path / folder}.db",
            schedule=schedule,
            folder=tmp_path,
            workdir=str(tmp_path / folder),
            progress=progress or Quiet(),
            **(section or {}),
        )
        return trainer.fit(letters, tasks, val, resume=resume)

    return run


def prompt_of(tmp_path: Path, version: str, folder: str = "work") -> str:
    """The text of a version of the prompt."""

    async def look() -> str:
        store = SQLiteStore(f"sqlite:///{tmp_path / folder}.db")
        resource = (await store.resource("prompt", version)).resource
        await store.close()
        assert isinstance(resource, PromptTemplate)
        return resource.template

    return asyncio.run(look())


def order_of(tmp_path: Path) -> str:
    """The algorithms that took the steps, in order."""

    async def look() -> str:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'work'}.db")
        versions = [version for name in ("prompt", "other") for version in await store.resources(name)]
        await store.close()
        return "".join(version.algorithm for version in sorted(versions, key=lambda version: version.created_at))

    return asyncio.run(look())


def test_the_last_of_a_sequence_goes_on(fit: Callable[..., Any], tmp_path: Path) -> None:
    first = fit(a=2, b=2)
    result = fit(a=2, b=4, resume=True)

    assert (0.0, 4.0, 0.0, 6.0) == (first.before, first.after, result.before, result.after)
    assert {"a": 2, "b": 4} == result.steps
    assert "aabbbb" == prompt_of(tmp_path, result.resources["prompt"])


@pytest.mark.parametrize(("steps", "order"), [({"a": 4, "b": 4}, "abababab"), ({"a": 2, "b": 4}, "ababbb")])
def test_algorithms_that_alternate_go_on_in_the_order_of_one_sitting(
    steps: dict[str, int], order: str, fit: Callable[..., Any], tmp_path: Path
) -> None:
    tunes = {"a": "prompt", "b": "other"}
    fit(a=2, b=2, tunes=tunes, schedule="alternate")
    result = fit(**steps, tunes=tunes, schedule="alternate", resume=True)

    assert steps == result.steps
    assert order == order_of(tmp_path)


def test_concurrent_algorithms_go_on_and_train_nothing_twice(fit: Callable[..., Any], tmp_path: Path) -> None:
    tunes = {"a": "prompt", "b": "other"}
    fit(a=1, b=1, tunes=tunes, schedule="concurrent")
    result = fit(a=3, b=2, tunes=tunes, schedule="concurrent", resume=True)

    assert {"a": 3, "b": 2} == result.steps

    async def look() -> list[str]:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'work'}.db")
        rollouts = await store.rollouts(RolloutQuery(experiment="small", mode="train"))
        await store.close()
        return sorted(f"{rollout.metadata['algorithm']}{rollout.metadata['step']}" for rollout in rollouts)

    assert ["a1", "a2", "a3", "b1", "b2"] == asyncio.run(look())


def test_an_earlier_one_of_a_sequence_goes_on_where_nobody_trained_what_it_left(fit: Callable[..., Any]) -> None:
    fit(a=1, b=1, tunes={"a": "prompt", "b": "other"})

    assert {"a": 2, "b": 1} == fit(a=2, b=1, tunes={"a": "prompt", "b": "other"}, resume=True).steps


def test_an_earlier_one_of_a_sequence_is_refused_where_a_later_one_trained_on(fit: Callable[..., Any]) -> None:
    fit(a=1, b=1)

    with pytest.raises(ConfigError, match=r"'a' asks for further steps on \['prompt'\], and 'b', which comes after it"):
        fit(a=2, b=1, resume=True)


def test_an_experiment_takes_a_new_algorithm_after_its_end(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit(a=1)
    result = fit(a=1, b=2, resume=True)

    assert "abb" == prompt_of(tmp_path, result.resources["prompt"])


def test_an_experiment_that_asks_for_nothing_more_is_refused(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit(a=2)
    with pytest.raises(ConfigError, match=r"is finished \(a: 2 steps done\) and its file asks for nothing more"):
        fit(a=2, resume=True)
    with pytest.raises(ConfigError, match=r"nothing more.* --fresh"):
        fit(a=1, resume=True)
    fit(a=2, use="fixed", folder="other")
    with pytest.raises(ConfigError, match="a cannot be continued after the end"):
        fit(a=3, use="fixed", folder="other", resume=True)

    async def look() -> str:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'work'}.db")
        state = await load_experiment(store, "small")
        await store.close()
        return "" if state is None else state.status

    assert "finished" == asyncio.run(look())


def test_a_continued_run_that_stops_can_be_resumed_like_any_other(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit(a=1)
    with pytest.raises(RuntimeError, match="stopped on purpose"):
        fit(a=4, breaks={"a": 3}, resume=True)
    result = fit(a=4, resume=True)

    assert "aaaa" == prompt_of(tmp_path, result.resources["prompt"])


class Said(Quiet):
    """Keeps what a run says about settings."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        if "continues after" in text or "restored" in text:
            self.lines.append(text)


def test_a_resumed_run_names_the_settings_that_changed(fit: Callable[..., Any]) -> None:
    said = Said()
    fit(a=1)
    fit(a=2, breaks={"a": 9}, section={"penalty": -1.0, "failed": "penalise"}, resume=True, progress=said)
    assert [
        'a: continues after step 1 with other settings: experiment.failed "penalise" (was "overflow"), '
        "experiment.penalty -1.0 (was 0.0), steps 2 (was 1), breaks_at 9 (was 0)"
    ] == said.lines[:1]


def test_a_resumed_run_says_where_it_continues_and_then_what_it_restores(fit: Callable[..., Any]) -> None:
    said = Said()
    with pytest.raises(RuntimeError, match="stopped on purpose"):
        fit(a=2, breaks={"a": 2})
    with pytest.raises(RuntimeError, match="stopped on purpose"):
        fit(a=2, breaks={"a": 2}, resume=True, progress=said)
    assert ["a: continues after step 1", "a: restored"] == said.lines


def test_an_algorithm_of_another_kind_under_the_same_name_is_refused(fit: Callable[..., Any]) -> None:
    fit(a=1)
    with pytest.raises(ConfigError, match=r"'a' of .* began as \"longer\" and its use is now \"fixed\""):
        fit(a=2, use="fixed", resume=True)


def test_the_reward_before_is_known_where_its_rollouts_were_removed(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit(a=1)

    async def remove() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'work'}.db")
        found = await store.rollouts(RolloutQuery(experiment="small"))
        await store.delete([rollout.rollout_id for rollout in found])
        await store.close()

    asyncio.run(remove())
    result = fit(a=2, resume=True)

    assert (0.0, 2.0) == (result.before, result.after)


def fail_in_the_second_step(fit: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(a=3, breaks={"a": -2})


@pytest.mark.parametrize("limits", [{"timeout_s": 60}, {"max_attempts": 5}, {"max_losses": 7, "retry_on": ["timeout"]}])
def test_a_run_that_was_interrupted_takes_other_limits_of_its_rollouts(
    limits: dict[str, Any], fit: Callable[..., Any]
) -> None:
    fail_in_the_second_step(fit)
    result = fit(a=3, resume=True, section={"runner": agl_run.runner("async", **limits)})

    assert ({"a": 3}, 0.0, 3.0) == (result.steps, result.before, result.after)


def test_what_was_live_before_the_first_step_is_not_measured_afterwards(
    fit: Callable[..., Any], tmp_path: Path
) -> None:
    fail_in_the_second_step(fit)
    result = fit(a=3, val=["y", "z"], resume=True)

    assert (None, 3.0) == (result.before, result.after)

    async def look() -> list[int]:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'work'}.db")
        found = await read_validations(store, "small", 1)
        await store.close()
        return [one.turn for one in found if len(one.rewards) == 2]

    assert [3] == asyncio.run(look())


def test_a_step_that_was_interrupted_does_not_go_on_with_other_tasks(fit: Callable[..., Any]) -> None:
    fail_in_the_second_step(fit)
    with pytest.raises(ConfigError, match=r"small-1-a-train-00002-00000-000 with other tasks, and .*--fresh"):
        fit(a=3, tasks=["w"], resume=True)
    assert {"a": 3} == fit(a=3, resume=True).steps
