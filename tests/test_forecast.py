"""``agl check --forecast`` forecasts what a run then records, and says what it will run before it does."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agl import PluginManager
from agl.contracts import RolloutQuery
from agl.stores import read_recordings
from agl_inspect.forecast.observed import ended_at
from agl_inspect.forecast.queueing import makespan
from agl_inspect.terminal.program import cli
from agl_run.config.file import load_config
from agl_run.run.trainer import Trainer
from agl_store_sqlite._store import SQLiteStore
from agl_testing.experiments import write_experiment
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder

LEARNER = '''
import agl
from agl.contracts import StepReport
from agl_testing.toys import ToyAlgorithm


class Collecting(ToyAlgorithm):
    """Learns nothing: collects groups of rollouts, and logs the tokens that would have trained."""

    def __init__(self, *, steps: int = 1, tasks_per_step: int = 8, group_size: int = 4):
        self._steps, self._tasks, self._size, self._step = steps, tasks_per_step, group_size, 0

    async def step(self):
        context, self._step = self._context, self._step + 1
        found = await context.collect(context.train[: self._tasks], step=self._step, n=self._size)
        rows = [row for episode in found.episodes for row in episode.rows]
        metrics = {
            "tokens": float(sum(sum(row.mask) for row in rows)),
            "row_tokens": float(sum(len(row.ids) // 4 for row in rows)),
            "rows": float(len(rows)),
        }
        return StepReport(step=self._step, is_finished=self._step >= self._steps, metrics=metrics)


class Sized(Collecting):
    """Says itself how many rollouts a step runs."""

    def __init__(self, *, batch: int = 5):
        super().__init__(tasks_per_step=batch, group_size=3)

    def step_size(self, tasks):
        return min(tasks, self._tasks), self._size


class Valued(Collecting):
    """Has a critic, so that no rollout is compared with others of its task."""

    def __init__(self, *, tasks_per_step: int = 8, group_size: int = 4, critic: dict = {}):
        super().__init__(tasks_per_step=tasks_per_step, group_size=group_size)


class Wordless(Collecting):
    """Says nothing of its steps."""

    def __init__(self):
        super().__init__()


class Searching(Wordless):
    """Knows the size of its whole run, from the tasks."""

    def run_size(self, context):
        return 10 * len(context.train), 0


class Reading(Wordless):
    """Learns from a file."""

    def run_size(self, context):
        return 0, 5


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="collecting", factory=Collecting, needs_token_ids=True)
    yield agl.AlgorithmEntry(name="sized", factory=Sized, needs_token_ids=True)
    yield agl.AlgorithmEntry(name="valued", factory=Valued, needs_token_ids=True)
    yield agl.AlgorithmEntry(name="wordless", factory=Wordless, needs_token_ids=True)
    yield agl.AlgorithmEntry(name="searching", factory=Searching, needs_token_ids=True)
    yield agl.AlgorithmEntry(name="reading", factory=Reading, needs_token_ids=True)
'''

POLICY = """
import agl
from agl_testing.toys import ToyPolicy


@agl.hookimpl
def agl_policies():
    yield agl.PolicyEntry(name="served-here", factory=ToyPolicy, trains=True)
"""

AGENT = """
import asyncio

import openai


async def solve(task, main):
    async with openai.AsyncOpenAI(base_url=main.base_url, api_key=main.api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(task["turns"]):
            answer = await client.chat.completions.create(model="scripted", messages=messages)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
            await asyncio.sleep(task["pause_s"])
    return float(len(text) % 2)
"""

TASKS = [{"question": f"what is {n}?", "turns": 1 + n % 3, "pause_s": 0.02 * (n % 5)} for n in range(12)]
UNKNOWN = [{**TASKS[0], "question": "what of nothing?"}]


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    """A model whose answers have between 20 and 60 words."""
    draw = random.Random(11)
    with ScriptedModelServer(respond=lambda _: Reply(text=" ".join(["word"] * draw.randint(20, 60)))) as server:
        yield server


@pytest.fixture
def experiment(
    agl_plugins: PluginFolder, server: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Writes an experiment of one algorithm and returns its file."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    agl_plugins.install(LEARNER, name="planlearner")
    agl_plugins.install(POLICY, name="planpolicy")

    def write(*, use: str = "collecting", params: str = "") -> Path:
        policy = f'\n[policy.main]\nuse = "served-here"\nbase_url = "{server.base_url}"\n'
        algorithm = f'\n[[algorithm]]\nuse = "{use}"\ntunes = "main"\nparams = {{ {params} }}\n'
        runner = "\n[runner]\nconcurrency = 4\n"
        return write_experiment(
            tmp_path / "plan",
            agent=AGENT,
            train=TASKS,
            val=UNKNOWN,
            more=policy + algorithm + runner,
        )

    return write


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def planned(*words: str | Path) -> dict[str, Any]:
    result = run("check", "--forecast", *words, "--json")
    assert 0 == result.exit_code, result.output
    return json.loads(result.stdout.splitlines()[-1])


def fitted(file: Path) -> dict[str, float]:
    """Run the experiment; returns what its last step logged."""
    Trainer.from_config(load_config(file), folder=file.parent, plugins=PluginManager.from_environment()).fit()

    async def read() -> dict[str, float]:
        store = SQLiteStore(f"sqlite:///{file.parent}/runs.db")
        try:
            return {one.name: one.value for one in await store.metrics("small")}
        finally:
            await store.close()

    return asyncio.run(read())


def test_trial_forecasts_the_tokens_of_a_later_step(experiment: Callable[..., Path]) -> None:
    file = experiment(params="tasks_per_step = 12, group_size = 8")

    step = planned(file, "--tasks", "12", "--samples", "2")["algorithms"][0]["step"]
    logged = fitted(file)

    assert 96 == step["rollouts"]
    assert logged["rows"] == pytest.approx(step["rows"]["mean"], rel=0.1)
    assert logged["tokens"] == pytest.approx(step["trained_tokens"]["mean"], rel=0.1)
    assert logged["row_tokens"] == pytest.approx(step["row_tokens"]["mean"], rel=0.1)


def test_recorded_rollouts_take_the_place_of_a_trial(
    experiment: Callable[..., Path], server: ScriptedModelServer
) -> None:
    file = experiment(params="tasks_per_step = 12, group_size = 4")
    logged = fitted(file)
    calls = len(server.calls)

    plan = planned(file)

    assert calls == len(server.calls)
    assert ("small", 1, 48, 12) == tuple(plan["source"][key] for key in ("experiment", "run", "rollouts", "tasks"))
    assert logged["tokens"] == pytest.approx(plan["algorithms"][0]["step"]["trained_tokens"]["mean"], rel=0.1)


def test_queue_takes_as_long_as_the_simulation_of_what_it_ran(experiment: Callable[..., Path]) -> None:
    file = experiment(params="tasks_per_step = 12, group_size = 4")
    fitted(file)

    async def read() -> list[tuple[float, float]]:
        store = SQLiteStore(f"sqlite:///{file.parent}/runs.db")
        found = [one async for one in read_recordings(store, RolloutQuery(experiment="small", mode="train"))]
        await store.close()
        return [(one.attempts[0].started_at, ended_at(one, one.attempts[0])) for one in found]

    times = asyncio.run(read())
    lasted = max(end for _, end in times) - min(begin for begin, _ in times)

    assert lasted == pytest.approx(makespan([end - begin for begin, end in times], concurrency=4), rel=0.25)


def test_trial_is_announced_and_kept_for_the_next_plan(
    experiment: Callable[..., Path], server: ScriptedModelServer
) -> None:
    file = experiment()

    first = run("check", "--forecast", file, "--tasks", "3", "--samples", "3")
    calls = len(server.calls)
    again = run("check", "--forecast", file)

    assert "running 9 rollouts (3 tasks x 3), which call the model" in first.stderr
    assert calls == len(server.calls)
    assert "running" not in again.stderr
    assert "9 rollouts of 3 tasks, from a trial" in again.stdout
    assert "a step of collecting: 8 tasks x 4 = 32 rollouts" in again.stdout


def test_no_run_calls_no_model(experiment: Callable[..., Path], server: ScriptedModelServer) -> None:
    result = run("check", "--forecast", experiment(), "--no-run")

    assert (1, 0) == (result.exit_code, len(server.calls))
    assert "no training rollout and no trial of 'small' is recorded" in result.stderr


def test_algorithm_that_says_its_size_is_asked(experiment: Callable[..., Path]) -> None:
    plan = planned(experiment(use="sized", params="batch = 4"), "--tasks", "2", "--samples", "4")

    assert (4, 3) == tuple(plan["algorithms"][0]["shape"][key] for key in ("tasks", "samples"))


def test_algorithm_that_says_nothing_of_its_steps_has_no_forecast(experiment: Callable[..., Path]) -> None:
    result = run("check", "--forecast", experiment(use="wordless"), "--tasks", "2", "--samples", "4")

    assert 0 == result.exit_code
    assert "a step of wordless: not known" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("use", "expected"),
    [("searching", "all of searching: at most 120 rollouts"), ("reading", "all of reading: 5 steps")],
)
def test_algorithm_that_knows_the_size_of_its_run_has_a_forecast_of_the_run(
    experiment: Callable[..., Path], use: str, expected: str
) -> None:
    result = run("check", "--forecast", experiment(use=use), "--tasks", "2", "--samples", "4")

    assert expected in " ".join(result.stdout.split())
    assert ("prompt tokens" in result.stdout.partition("all of")[2]) == (use == "searching")


@pytest.mark.parametrize(("use", "params"), [("collecting", "group_size = 1"), ("valued", "group_size = 4")])
def test_algorithm_that_compares_no_rollouts_of_a_task_has_no_silent_groups(
    experiment: Callable[..., Path], use: str, params: str
) -> None:
    file = experiment(use=use, params=params)
    (found,) = planned(file, "--tasks", "4", "--device", "cpu", "--model", "300M")["algorithms"]

    assert (None, [], None) == (found["gradient_share"], found["silent"], found["best_size"])
    assert found["on_device"]["update_s"] > 1
    assert "teach nothing" not in run("check", "--forecast", file).stdout


def test_text_of_agents_is_shown_and_not_obeyed(experiment: Callable[..., Path]) -> None:
    file = experiment()
    hostile = 'def solve(task):\n    raise ValueError("no \\x1b[2J [bold]answer" + "!" * 300)\n'
    (file.parent / "hostile.py").write_text(hostile)

    result = run(
        "check", "--forecast", file, "--tasks", "4", "--samples", "2", "--set", "experiment.agent=hostile:solve"
    )

    assert "8 of 8 rollouts failed: ValueError: no \\x1b[2J [bold]answer!" in " ".join(result.stdout.split())
    assert "\x1b" not in result.stdout + run("check", "--forecast", file, "--json").stdout


def test_lines_fit_eighty_columns_and_a_minute(experiment: Callable[..., Path]) -> None:
    file = experiment(params="tasks_per_step = 12, group_size = 21")
    fitted(file)
    started = time.perf_counter()

    result = run("check", "--forecast", file)

    assert "252 rollouts of 12 tasks" in result.stdout
    assert 60 > time.perf_counter() - started
    assert 80 >= max(len(line) for line in result.stdout.splitlines() if "agl show" not in line)
