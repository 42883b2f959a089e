"""The metrics of an experiment that was started afresh, and of several algorithms, as the commands show them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import agl
from agl.algorithms import algorithm
from agl_inspect.terminal.program import cli
from agl_run import Quiet, ScheduleConfig
from agl_store_sqlite._store import SQLiteStore
from agl_testing.plugins import PluginFolder

STEPPER = '''
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm


class Stepper(ToyAlgorithm):
    """Publishes a prompt at every step, and reports ``level`` as its reward."""

    def __init__(self, *, steps: int = 2, level: float = 0.0, fails_at: int = 0):
        self._steps, self._level, self._fails_at, self._step = steps, level, fails_at, 0

    async def step(self):
        self._step += 1
        if self._step == self._fails_at:
            raise RuntimeError("stopped on purpose")
        name = self._context.tunes[0]
        await self._context.publish(name, PromptTemplate(template=f"{self._level} {self._step}"), step=self._step)
        is_finished = self._step >= self._steps
        return StepReport(step=self._step, is_finished=is_finished, metrics={"reward": self._level})


@agl.hookimpl
def agl_algorithms():
    for name in ("stepper", "other"):
        yield agl.AlgorithmEntry(name=name, factory=Stepper, tunes=("prompt_template",), needs_token_ids=False)
'''


def solve(task: str, **prompts: Any) -> float:
    return 0.5


Fit = Callable[..., None]


@pytest.fixture
def fit(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fit:
    """Runs an experiment with a validation after every step, in the only store of the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    agl_plugins.install(STEPPER, name="stepping")

    def run(*algorithms: Any, name: str = "calc", resume: bool = False, fresh: bool = False) -> None:
        agl.Trainer(
            name=name,
            store="sqlite:///runs/agl.db",
            algorithm=list(algorithms),
            schedule=ScheduleConfig(mode="alternate"),
            initial_resources={each: agl.PromptTemplate(template="none") for each in ("one", "two")},
            validate_every=1,
            progress=Quiet(),
        ).fit(solve, train_dataset=["a"], val_dataset=["b"], resume=resume, fresh=fresh)

    return run


def shown(*words: str) -> str:
    result = CliRunner().invoke(cli, words, env={"COLUMNS": "80"})
    assert 0 == result.exit_code, result.output
    return result.stdout


def steps_of(*words: str) -> dict[tuple[int, str], list[int]]:
    """The steps that ``agl metrics`` shows, by run and algorithm."""
    steps: dict[tuple[int, str], list[int]] = {}
    for metric in json.loads(shown("metrics", "--name", "reward", "--json", *words)):
        steps.setdefault((metric["run"], metric["algorithm"]), []).append(metric["step"])
    return steps


@pytest.fixture
def twice(fit: Fit) -> None:
    """An experiment of three steps, and its fresh start, which ended after two."""
    fit(algorithm("stepper", tunes="one", steps=3, level=0.25))
    fit(algorithm("stepper", tunes="one", steps=2, level=0.75), fresh=True)


FIRST = {(1, "stepper"): [1, 2, 3], (1, "validate"): [0, 1, 2, 3]}
SECOND = {(2, "stepper"): [1, 2], (2, "validate"): [0, 1, 2]}


@pytest.mark.usefixtures("twice")
def test_fresh_start_leaves_the_metrics_of_the_run_before_as_they_were() -> None:
    assert SECOND == steps_of()
    assert FIRST == steps_of("--run", "1")
    assert FIRST | SECOND == steps_of("--run", "all")
    assert "run 1 stepper\nstep  reward\n3     0.25\n" in shown("metrics", "--run", "all", "--last", "1")


@pytest.mark.usefixtures("twice")
def test_plot_shows_the_newest_run_with_its_own_versions() -> None:
    drawn = shown("metrics", "--plot", "--algorithm", "stepper")
    assert "● stepper: 0.75 at step 2\n" in drawn
    assert ["one@calc-2-stepper-1", "one@calc-2-stepper-2"] == [
        line.split()[-1] for line in drawn.splitlines() if line.startswith("▲")
    ]
    both = shown("metrics", "--plot", "--algorithm", "stepper", "--run", "all")
    assert "● run 1 stepper: 0.25 at step 3\n○ run 2 stepper: 0.75 at step 2" in both


@pytest.mark.usefixtures("twice")
def test_run_without_metrics_is_answered_with_those_that_have_some() -> None:
    result = CliRunner().invoke(cli, ("metrics", "--run", "3"))
    expected = "Error: run 3 of experiment 'calc' has no metrics; give --run one of these that has: 1, 2, or all\n"
    assert (1, expected) == (result.exit_code, result.output)
    assert (
        "'0' is not a run; write its number, from 1, or all"
        in CliRunner().invoke(cli, ("metrics", "--plot", "--run", "0")).output
    )


@pytest.mark.usefixtures("twice")
def test_tables_and_the_file_of_metrics_say_which_run() -> None:
    metrics = "SELECT run, max(step) AS last FROM metrics WHERE algorithm = 'stepper' GROUP BY run"
    assert [{"run": 1, "last": 3}, {"run": 2, "last": 2}] == json.loads(shown("sql", metrics, "--json"))
    rollouts = "SELECT run, count(*) AS n FROM rollouts GROUP BY run"
    assert [{"run": 1, "n": 4}, {"run": 2, "n": 3}] == json.loads(shown("sql", rollouts, "--json"))
    (file,) = Path().rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [1] * 11 + [2] * 8 == [line["run"] for line in lines]


def places(experiment: str = "calc") -> dict[str, list[tuple[int, int | None]]]:
    """For every algorithm its steps with the experiment's."""

    async def look() -> dict[str, list[tuple[int, int | None]]]:
        store = SQLiteStore("sqlite:///runs/agl.db")
        found: dict[str, list[tuple[int, int | None]]] = {}
        for metric in await store.metrics(experiment, name="reward"):
            found.setdefault(metric.algorithm, []).append((metric.step, metric.experiment_step))
        await store.close()
        return found

    return asyncio.run(look())


ALTERNATING = {
    "one": [(1, 1), (2, 3)],
    "two": [(1, 2), (2, 4)],
    "validate": [(step, step) for step in range(5)],
}


def pair(**params: Any) -> list[Any]:
    """Two algorithms that take turns; the second one gets ``params``."""
    first = algorithm("stepper", name="one", tunes="one", level=0.25)
    return [first, algorithm("other", name="two", tunes="two", level=0.75, **params)]


def test_numbers_of_algorithms_that_take_turns_have_places_on_one_axis(fit: Fit) -> None:
    fit(*pair())

    assert ALTERNATING == places()
    assert "○ two: 0.75 at step 4" in shown("metrics", "--plot")
    assert "▲ step 4: two@calc-1-two-2" in shown("metrics", "--plot")
    assert "step  of all  reward\n1     2       0.75\n2     4       0.75\n" in shown("metrics", "--algorithm", "two")
    assert "of all" not in shown("metrics", "--algorithm", "validate")


def test_places_go_on_where_a_stopped_run_was(fit: Fit) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(*pair(fails_at=2))
    fit(*pair(), resume=True)

    assert ALTERNATING == places()


def test_several_experiments_are_drawn_over_each_other(fit: Fit, tmp_path: Path) -> None:
    fit(algorithm("stepper", tunes="one", steps=3, level=0.25))
    fit(algorithm("stepper", tunes="one", steps=2, level=0.75), name="longer")

    drawn = shown("metrics", "--plot", "calc", "longer", "--algorithm", "stepper").splitlines()
    assert "reward over step" == drawn[0]
    assert ["● calc stepper: 0.25 at step 3", "○ longer stepper: 0.75 at step 2"] == drawn[-2:]
    assert 2 == drawn[1].count("○")
    assert 3 == drawn[-4].count("●")
    assert ["1", "3"] == drawn[-3].split()
    coloured = (
        CliRunner().invoke(cli, ("metrics", "--plot", "calc", "longer", "--algorithm", "stepper"), color=True).stdout
    )
    assert all(mark in coloured for mark in ("\x1b[36m●\x1b[0m calc", "\x1b[33m○\x1b[0m longer"))
    shown("metrics", "--plot", "calc", "longer", "--output", "both.svg")
    picture = (tmp_path / "both.svg").read_text()
    assert all(f"<!-- {label} -->" in picture for label in ("calc stepper", "longer validate", "one@calc-1-stepper-3"))


@pytest.mark.parametrize("saves", range(1, 9))
def test_run_that_ends_right_after_it_saved_keeps_every_number(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    class Power(BaseException):
        """The machine is switched off."""

    done = 0
    save = SQLiteStore.save_state

    async def save_and_stop(self: SQLiteStore, *args: Any, **options: Any) -> None:
        nonlocal done
        await save(self, *args, **options)
        done += 1
        if done == saves:
            raise Power

    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStore, "save_state", save_and_stop)
        with pytest.raises(Power):
            fit(algorithm("stepper", tunes="one", steps=3, level=0.25))
    fit(algorithm("stepper", tunes="one", steps=3, level=0.25), resume=True)

    assert FIRST == steps_of("calc")
