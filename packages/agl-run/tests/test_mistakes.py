"""Mistakes in experiment files and commands: each is answered with one paragraph that says what to do instead.

The mistakes are in ``mistakes.toml``, each with the edit to a good experiment, the command and the message.
"""

import asyncio
import importlib
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import agl_data.plugin
import agl_replay.plugin
from agl import AlgorithmEntry, PluginManager, PolicyEntry, Rollout, hookimpl
from agl.contracts import AlgorithmContext, StepReport
from agl.schemas import PromptTemplate, ResourceVersion
from agl_inspect.terminal.program import cli
from agl_run import Quiet, Trainer
from agl_store_sqlite._store import SQLiteStore

BOOK = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))
GOOD: dict[str, str] = BOOK["good"]
MISTAKES: dict[str, dict[str, Any]] = {mistake["name"]: mistake for mistake in BOOK["mistake"]}


class Toy:
    """Collects once and then finishes."""

    def __init__(self, *, steps: int = 1, lr: float = 0.1) -> None: ...

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        await self._context.collect(self._context.train, step=1)
        return StepReport(step=1, is_finished=True)

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class ToyPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [
            AlgorithmEntry(name="toy", factory=Toy, tunes=("prompt_template",), needs_token_ids=False),
            AlgorithmEntry(name="weights-toy", factory=Toy),
        ]

    @hookimpl
    def agl_policies(self) -> list[PolicyEntry]:
        return [PolicyEntry(name="trainable", factory=dict, trains=True)]


def plugins() -> PluginManager:
    """Return a manager with the plugins of the core, the engine, replays and data, and the toy plugin."""
    manager = PluginManager()
    manager.register(agl_data.plugin, name="data")
    manager.register(agl_replay.plugin, name="replay")
    manager.register(ToyPlugin(), name="toy")
    return manager


async def record(path: Path) -> None:
    """Fill a store with two rollouts and two versions of a prompt."""
    store = SQLiteStore(f"sqlite:///{path}")
    versions = (ResourceVersion(name="prompt", version=name, resource=PromptTemplate(template=name)) for name in "ab")
    await store.publish(list(versions))
    await store.enqueue([Rollout(rollout_id=f"ro-{number}", task={"q": 1}, experiment="one") for number in range(2)])
    await store.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "agl.db"
    asyncio.run(record(path))
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a new working directory, and forget its modules after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("AGL_STORE", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def lay_out(folder: Path, mistake: dict[str, Any], *, recorded: bytes) -> None:
    """Write the files of the good experiment with the mistake in them."""
    files = {**GOOD, **mistake.get("files", {})}
    line = mistake.get("line", "")
    assert not line or files["experiment.toml"].count(line) == 1, f"{line!r} is not once in the good experiment"
    files["experiment.toml"] = files["experiment.toml"].replace(line, mistake.get("becomes", line))
    files["experiment.toml"] += mistake.get("adds", "")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "folder").mkdir()
    if mistake.get("is_recorded"):
        (folder / "runs").mkdir()
        (folder / "runs" / "agl.db").write_bytes(recorded)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_answered_with_one_paragraph_and_the_next_step(name: str, folder: Path, recorded: bytes) -> None:
    mistake = MISTAKES[name]
    lay_out(folder, mistake, recorded=recorded)

    command = shlex.split(mistake.get("command", "check experiment.toml"))
    result = CliRunner().invoke(cli, command, obj=plugins(), prog_name="agl")

    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2), result.output
    message = result.stderr.replace(f"{folder}{os.sep}", "").replace(str(folder), "{folder}").strip()
    assert "\n\n" not in message
    assert "Traceback" not in message
    for part in mistake["says"].split("…"):  # … stands for the words of other libraries
        assert part in message


RECORDING = """\
[experiment]
agent = "agent:solve"
train = "train.jsonl"
[[reward]]
use = "badrew:R"
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("float(rollout.task['anser'])", "the reward 'badrew:R' raised KeyError: 'anser' at badrew.py:2 (1)."),
        ("float('nan')", "the reward 'badrew:R' returned nan; return a finite number, or None for no reward (1)."),
        ("'good'", "the reward 'badrew:R' returned str; return a number or a Reward (1)."),
    ],
)
def test_reward_that_fails_is_named_with_its_line_and_no_traceback(result: str, says: str, folder: Path) -> None:
    (folder / "experiment.toml").write_text(RECORDING)
    (folder / "train.jsonl").write_text('{"q": 1}')
    (folder / "agent.py").write_text("def solve(task): return 'two'\n")
    (folder / "badrew.py").write_text(f"def R(rollout, spans):\n    return {result}\n")

    command = [sys.executable, "-m", "agl_run", "--no-plugins", "run", "experiment.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert 1 == done.returncode
    assert says in done.stderr
    assert "Correct the agent or the reward, then run it again with --fresh" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("float(rollout.task['anser'])", "the reward 'R' raised KeyError: 'anser' at badrew.py:2"),
        ("float('nan')", "the reward 'R' returned nan"),
    ],
)
def test_reward_that_fails_asynchronously_is_named_too(result: str, says: str, folder: Path) -> None:
    (folder / "badrew.py").write_text(f"async def R(rollout, spans):\n    return {result}\n")
    sys.path.insert(0, str(folder))
    trainer = Trainer(store="memory://", rewards=importlib.import_module("badrew").R, folder=folder, progress=Quiet())

    (episode,) = trainer.dev(lambda task: "two", [{"q": 1}]).episodes

    assert episode.attempt is not None
    assert episode.attempt.error is not None
    assert says in episode.attempt.error.message


def test_the_good_experiment_has_no_mistake(folder: Path, recorded: bytes) -> None:
    lay_out(folder, {}, recorded=recorded)

    result = CliRunner().invoke(cli, ["check", "experiment.toml"], obj=plugins())

    assert (0, "no problem found; start with: agl run experiment.toml") == (
        result.exit_code,
        result.output.splitlines()[-1],
    )


def test_a_hundred_mistakes_are_collected() -> None:
    assert len(MISTAKES) >= 100
