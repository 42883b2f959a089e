"""A run that is refused at its start does not count as started, and changes nothing about an earlier run."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agl import AlgorithmEntry, PluginManager, Rollout, Span, hookimpl
from agl.algorithms import algorithm, component
from agl.contracts import AlgorithmContext, StepReport
from agl.errors import ConfigError, PolicyError
from agl.schemas import PromptTemplate
from agl_inspect.records.state import load_experiment
from agl_inspect.terminal.program import cli
from agl_run import FitResult, Quiet, Trainer, policy
from agl_store_sqlite._store import SQLiteStore


class Counting:
    """Collects once per step; can be extended, and refuses to be set up if the settings say so."""

    def __init__(self, *, steps: int, refuses: bool = False) -> None:
        self._steps, self._refuses, self._step = steps, refuses, 0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context
        if self._refuses:
            raise ConfigError("this machine has no spare minute")

    async def step(self) -> StepReport:
        self._step += 1
        await self._context.collect(self._context.train, step=self._step)
        return StepReport(step=self._step, is_finished=self._step >= self._steps)

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None:
        pass

    def has_more(self, state: dict[str, Any], *, tasks: int, sources_go_on: bool) -> bool:
        return state["step"] < self._steps


class CountingPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [AlgorithmEntry(name="counting", factory=Counting, tunes=("prompt_template",), needs_token_ids=False)]


def score(rollout: Rollout, spans: Sequence[Span]) -> float:
    return 1.0


def unusable(answer: str) -> float:
    return 1.0


def agent(task: Any, prompt: PromptTemplate) -> None: ...


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    return tmp_path


def fit(
    *, template: str = "Hello", steps: int = 1, refuses: bool = False, rewards: Any = score, **settings: Any
) -> FitResult:
    manager = PluginManager()
    manager.register(CountingPlugin(), name="counting")
    start = {name: settings.pop(name) for name in ("resume", "fresh") if name in settings}
    return Trainer(
        name="small",
        store="sqlite:///small.db",
        algorithm=algorithm("counting", steps=steps, refuses=refuses),
        initial_resources={"prompt": PromptTemplate(template=template)},
        rewards=rewards,
        plugins=manager,
        progress=Quiet(),
        **settings,
    ).fit(agent, [{"q": 1}], **start)


def status(folder: Path) -> tuple[str, int] | None:
    """Return the experiment's status and run number in the store; ``None`` if it never ran."""

    async def load() -> Any:
        store = SQLiteStore(f"sqlite:///{folder}/small.db")
        try:
            return await load_experiment(store, "small")
        finally:
            await store.close()

    found = asyncio.run(load())
    return found and (found.status, found.run)


NO_KEY = {"policies": {"main": policy("openai", base_url="https://api.openai.com/v1", model="m")}}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "reward with wrong arguments": ({"rewards": unusable}, ConfigError, "the reward 'unusable' takes"),
    "reward with a wrong parameter": (
        {"rewards": component("exact-match", fild=1)},
        ConfigError,
        "no parameter 'fild'",
    ),
    "key that is not set": (NO_KEY, PolicyError, "needs the environment variable OPENAI_API_KEY"),
    "algorithm that refuses its setup": ({"refuses": True}, ConfigError, "no spare minute"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_run_that_was_refused_starts_without_resume_on_the_next_try(case: str, folder: Path) -> None:
    settings, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        fit(**settings)
    assert not (folder / "small.db").exists() or status(folder) is None

    assert {"counting": 1} == fit(template="Hello, corrected").steps
    assert ("finished", 1) == status(folder)


@pytest.mark.parametrize("start", [{"fresh": True}, {"resume": True, "steps": 2}])
@pytest.mark.parametrize("case", REFUSED)
def test_finished_run_stays_finished_where_its_next_start_is_refused(
    case: str, start: dict[str, Any], folder: Path
) -> None:
    fit()
    settings, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        fit(**settings, **start)
    assert ("finished", 1) == status(folder)

    with pytest.raises(ConfigError, match="experiment 'small' is finished; pass --fresh"):
        fit()
    with pytest.raises(ConfigError, match="its file asks for nothing more"):
        fit(resume=True)
    assert {"counting": 2} == fit(resume=True, steps=2).steps


FINISHED = """
[experiment]
name = "ended"
agent = "ended_agent:solve"
store = "sqlite:///ended.db"
val = "tasks.jsonl"
"""


def test_resuming_a_finished_experiment_at_the_terminal_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that restarts failed programs would otherwise start a finished run forever."""
    monkeypatch.syspath_prepend(str(folder))
    (folder / "ended_agent.py").write_text("def solve(task):\n    return 1.0\n")
    (folder / "tasks.jsonl").write_text('{"q": 1}\n')
    (folder / "ended.toml").write_text(FINISHED)

    def run(*words: str) -> Result:
        return CliRunner().invoke(cli, ["run", "ended.toml", "--quiet", *words])

    assert 0 == run("--resume").exit_code
    again, as_json, plain = run("--resume"), run("--resume", "--json"), run()

    assert (0, "") == (again.exit_code, again.stderr)
    assert again.stdout.startswith("nothing to do: experiment 'ended' is finished")
    assert "more steps" in again.stdout
    assert (0, "ended") == (as_json.exit_code, json.loads(as_json.stdout)["experiment"])
    assert 1 == plain.exit_code  # without --resume somebody wants it run
    assert ["ended"] == [path.stem for path in folder.glob("*.db")]
