"""One algorithm learns from the rollouts that another paid for: in every schedule, with staleness, over restarts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.algorithms import algorithm
from agl.errors import ConfigError
from agl.schemas import Outcome, PromptTemplate
from agl.stores import MemoryStore
from agl_inspect.records.sources import finished
from agl_run import Quiet
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import asyncio
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm

LOG = []


class Payer(ToyAlgorithm):
    """Collects, and writes its step into the prompt that it tunes."""

    def __init__(self, *, steps=3, pause_s=0.0):
        self._steps, self._pause, self._step = steps, pause_s, 0

    async def step(self):
        context, self._step = self._context, self._step + 1
        await context.collect(context.train, step=self._step)
        await asyncio.sleep(self._pause)
        await context.publish(context.tunes[0], PromptTemplate(template=f"{self._step}"), step=self._step)
        return StepReport(step=self._step, is_finished=self._step >= self._steps)


class Student(ToyAlgorithm):
    """Only reads what others paid for."""

    def __init__(self, *, max_age=None, fails_at=0):
        self._max_age, self._fails_at, self._step, self._seen = max_age, fails_at, 0, {}

    async def step(self):
        context = self._context
        found = await context.recorded(after=self._seen, max_age=self._max_age)
        if self._fails_at == self._step + 1:
            raise RuntimeError("stopped on purpose")
        self._step += 1
        self._seen = found.steps
        ids = [episode.rollout.rollout_id for episode in found.episodes]
        LOG.append((self._step, ids, found.dropped, len(found.groups())))
        await context.publish(context.tunes[0], PromptTemplate(template=f"s{self._step}"), step=self._step)
        return StepReport(step=self._step, is_finished=found.is_over, trained=tuple(ids))

    def state(self):
        return {"step": self._step, "seen": self._seen}

    async def restore(self, state):
        self._step, self._seen = state["step"], state["seen"]


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="payer", factory=Payer, tunes=("prompt_template",), needs_token_ids=False)
    yield agl.AlgorithmEntry(
        name="student", factory=Student, tunes=("prompt_template",), needs_token_ids=False, shares=True
    )
'''

Log = list[tuple[int, list[str], dict[str, int], int]]


@pytest.fixture
def log(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Log:
    """The student's input at each step: ids, what was left out, and the number of groups."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return __import__(agl_plugins.install(PLUGIN, name="sharing")).LOG


@pytest.fixture
def trainer(log: Log, tmp_path: Path) -> Callable[..., agl.Trainer]:
    """A payer and a student with a prompt each; `student` and `payer` are their further settings."""

    def make(*, student: dict[str, Any], payer: dict[str, Any] | None = None, **changes: Any) -> agl.Trainer:
        settings: dict[str, Any] = {
            "algorithm": [
                algorithm("payer", **{"tunes": "own", **(payer or {})}),
                algorithm("student", **{"tunes": "prompt", "source": "payer", **student}),
            ],
            "initial_resources": {"own": PromptTemplate(template="o"), "prompt": PromptTemplate(template="p")},
            "store": "memory://",
            "folder": tmp_path,
            "progress": Quiet(),
        }
        return agl.Trainer(**{**settings, **changes})

    return make


async def solve(task: str) -> float | None:
    """No reward for one of the tasks."""
    return None if task == "mute" else 1.0


def ids_of(steps: range, tasks: int = 2) -> list[str]:
    return [f"experiment-1-payer-train-{step:05d}-{task:05d}-000" for step in steps for task in range(tasks)]


def test_later_algorithm_reads_all_that_the_earlier_one_paid_for(trainer: Callable[..., agl.Trainer], log: Log) -> None:
    result = trainer(student={}).fit(solve, train_dataset=["a", "b", "mute"])

    assert {"payer": 3, "student": 1} == result.steps
    assert [(1, [i for s in (1, 2, 3) for i in ids_of(range(s, s + 1))], {"no reward": 3}, 6)] == log


def test_algorithms_that_take_turns_see_each_step_once(trainer: Callable[..., agl.Trainer], log: Log) -> None:
    trainer(student={}, schedule="alternate").fit(solve, train_dataset=["a", "b"])

    assert [(step, ids_of(range(step, step + 1)), {}, 2) for step in (1, 2, 3)] == log


@pytest.mark.timeout(60)
def test_concurrent_algorithm_waits_for_the_other_and_misses_nothing(
    trainer: Callable[..., agl.Trainer], log: Log
) -> None:
    result = trainer(student={}, payer={"steps": 5, "pause_s": 0.02}, schedule="concurrent").fit(
        solve, train_dataset=["a", "b"]
    )

    assert 5 == result.steps["payer"]
    assert ids_of(range(1, 6)) == [i for _, ids, _, _ in log for i in ids]
    assert all(ids for _, ids, _, _ in log[:-1]), "a step without news did not wait"


def test_rollouts_of_versions_that_are_too_old_are_counted_and_left_out(
    trainer: Callable[..., agl.Trainer], log: Log
) -> None:
    trainer(student={"tunes": "own", "max_age": 1}).fit(solve, train_dataset=["a", "b"])

    assert [(1, ids_of(range(3, 4)), {"stale": 4}, 2)] == log


def test_restart_reads_on_where_the_last_finished_step_ended(
    trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(student={"fails_at": 2}, schedule="alternate", store=url).fit(solve, train_dataset=["a", "b"])

    trainer(student={}, schedule="alternate", store=url).fit(solve, train_dataset=["a", "b"], resume=True)

    assert sorted(ids_of(range(1, 4))) == sorted(i for _, ids, _, _ in log for i in ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student": {"source": "payr"}}, "source 'payr', and no other algorithm has that name; did you mean 'payer'"),
        ({"student": {"source": "student"}}, "and no other algorithm has that name; the others are"),
        ({"student": {}, "payer": {"source": "student"}}, "collects its own rollouts only; remove its source"),
    ],
)
def test_source_that_cannot_give_anything_is_refused(
    trainer: Callable[..., agl.Trainer], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**changes).fit(solve, train_dataset=["a"])


def test_source_that_runs_later_or_pays_for_nothing_is_refused(trainer: Callable[..., agl.Trainer]) -> None:
    payer = algorithm("payer", tunes="own")
    first = algorithm("student", tunes="prompt", source="payer")
    second = algorithm("student", tunes="third", source="student", name="second")
    third = {name: PromptTemplate(template="x") for name in ("own", "prompt", "third")}

    with pytest.raises(ConfigError, match="learns from 'payer', which runs after it"):
        trainer(student={}, algorithm=[first, payer]).fit(solve, train_dataset=["a"])
    with pytest.raises(ConfigError, match="itself learns from"):
        trainer(student={}, algorithm=[payer, first, second], initial_resources=third).fit(solve, train_dataset=["a"])


def test_context_without_a_source_says_what_to_set(trainer: Callable[..., agl.Trainer]) -> None:
    with pytest.raises(ConfigError, match="has no source; name the algorithm"):
        trainer(student={"source": ()}).fit(solve, train_dataset=["a"])


def test_rollouts_of_another_experiment_are_learned_from_without_tasks_of_its_own(
    trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    payer = algorithm("payer", tunes="own")
    trainer(student={}, algorithm=payer, store=url).fit(solve, train_dataset=["a", "b", "mute"])

    student = algorithm("student", tunes="prompt", source="experiment:experiment")
    result = trainer(student={}, name="offline", algorithm=student, store=url).fit(solve)

    assert {"student": 1} == result.steps
    ((step, ids, dropped, groups),) = log
    assert (1, {"no reward": 3}, 6) == (step, dropped, groups)
    assert sorted(i for s in (1, 2, 3) for i in ids_of(range(s, s + 1))) == sorted(ids)


async def finish(store: MemoryStore, name: str, **changes: Any) -> None:
    await store.enqueue([agl.Rollout(rollout_id=name, task={}, **{"experiment": "served", **changes})])
    (claim,) = await store.claim(worker="test")
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])


def test_finished_rollouts_come_in_the_order_of_their_ends_and_each_once() -> None:
    async def read() -> list[tuple[list[str], bool]]:
        store, seen, after = MemoryStore("memory://"), list[tuple[list[str], bool]](), 0
        for name in ("c", "a", "b"):
            await finish(store, name)
        await finish(store, "validation", mode="val")
        await finish(store, "another", experiment="another")
        for step in range(4):
            found = await finished(store, "served", after=after, limit=2)
            after = found.cursor
            seen.append(([rollout.rollout_id for rollout in found.rollouts], found.is_all))
            if step == 1:
                await finish(store, "late")
                await finish(store, "gone")
                await store.delete(["gone"])
        return seen

    assert [(["c", "a"], False), (["b"], True), (["late"], True), ([], True)] == asyncio.run(read())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("experiment:", "names no other experiment"),
        ("experiment:experiment", "names no other experiment"),
        (("payer", "experiment:served"), "both algorithms and other experiments"),
        ("experiment:served", "no finished training rollouts of the experiment 'served'"),
    ],
)
def test_experiment_that_cannot_be_a_source_is_refused(
    trainer: Callable[..., agl.Trainer], source: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(student={"source": source}).fit(solve, train_dataset=["a"])
