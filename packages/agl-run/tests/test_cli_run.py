"""``agl run``: its final message names the live versions, or what is left of a run that was stopped."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agl
from agl.contracts import AlgorithmContext, StepReport
from agl.schemas import PromptTemplate
from agl_inspect.terminal.program import cli

FILE = """
[experiment]
name = "kept"
agent = "shares:share"
train = "train.jsonl"
val = "val.jsonl"
validate_every = 1

[resource.prompt]
template = "0.1"

[[algorithm]]
use = "writing"
tunes = "prompt"
"""

TEXTS = ("0.95", "0.05", "0.05", "")
"""The text that each step publishes, ``""`` for none; its reward is high first, and then collapses twice."""


class Writing:
    """An algorithm that publishes a text in each step, and can return to earlier states."""

    def __init__(self) -> None:
        self._step = 0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        self._step += 1
        if text := TEXTS[self._step - 1]:
            await self._context.publish("prompt", PromptTemplate(template=text), step=self._step)
        return StepReport(step=self._step, is_finished=self._step == len(TEXTS))

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]

    async def go_back(self, state: Mapping[str, Any], *, rate: float) -> None: ...

    async def close(self) -> None: ...


class WritingPlugin:
    @agl.hookimpl
    def agl_algorithms(self) -> list[agl.AlgorithmEntry]:
        return [agl.AlgorithmEntry(name="writing", factory=Writing, tunes=("prompt_template",), needs_token_ids=False)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a working directory that contains the experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shares.py").write_text(
        "def share(task, prompt):\n    return float(task['n'] < 20 * float(prompt.template))\n"
    )
    (tmp_path / "train.jsonl").write_text('{"n": 0}')
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps({"n": n}) for n in range(20)))
    (tmp_path / "experiment.toml").write_text(FILE)
    yield tmp_path
    sys.modules.pop("shares", None)


@pytest.mark.usefixtures("folder")
def test_last_words_name_the_live_version_where_a_newer_one_was_given_up() -> None:
    manager = agl.PluginManager.from_environment()
    manager.register(WritingPlugin(), name="writing")

    def agl_(*words: str) -> str:
        done = CliRunner().invoke(cli, words, obj=manager, prog_name="agl", catch_exceptions=False)
        assert 0 == done.exit_code, done.output
        return done.stdout

    words = agl_("run", "experiment.toml", "--quiet")

    live = "kept-1-writing-1"
    assert f"prompt: {live}" in words.splitlines()
    (line,) = (line for line in words.splitlines() if line.startswith("take prompt with you: "))
    show, export = line.removeprefix("take prompt with you: ").split(", ")
    assert (f"agl resources show prompt {live}", f"agl data export prompt@{live} --format json") == (show, export)
    assert "0.95" in agl_(*show.split()[1:])
    assert "0.95" in agl_(*export.split()[1:])
    assert "0.95" in agl_("resources", "show", "prompt")


def run(*words: str) -> Result:
    manager = agl.PluginManager.from_environment()
    manager.register(WritingPlugin(), name="writing")
    return CliRunner().invoke(cli, words, obj=manager, prog_name="agl", catch_exceptions=False)


def test_interrupt_before_the_run_begins_says_that_there_is_nothing_to_continue(folder: Path) -> None:
    (folder / "stopped.py").write_text("raise KeyboardInterrupt\n")  # where a person's Ctrl-C would raise it
    early = ("run", "experiment.toml", "--set", "experiment.agent=stopped:solve", "--quiet")

    done = run(*early)
    assert (130, True) == (done.exit_code, "stopped before anything was saved" in done.stderr)
    assert "--resume" not in done.stderr
    assert 0 == run("run", "experiment.toml", "--quiet").exit_code
    done = run(*early)
    assert (130, True) == (done.exit_code, "experiment 'kept' is finished, and there is nothing" in done.stderr)
    done = run(*early, "--resume")  # perhaps of further steps
    assert (130, True) == (done.exit_code, "--quiet --resume" in done.stderr)


def test_interrupt_of_a_run_whose_store_does_not_answer_proposes_to_continue(folder: Path) -> None:
    (folder / "stopped.py").write_text("raise KeyboardInterrupt\n")
    (folder / "kept.db").write_text("no database, and perhaps one again tomorrow")
    store = ("--set", "experiment.store=sqlite:///kept.db")
    done = run("run", "experiment.toml", "--set", "experiment.agent=stopped:solve", *store)
    assert (130, True) == (done.exit_code, done.stderr.endswith("--resume\n")), done.stderr


def test_what_an_agent_prints_is_not_in_the_json(folder: Path) -> None:
    (folder / "loud.py").write_text("def solve(task, prompt):\n    print('hello')\n    return 1.0\n")
    done = run("dev", "experiment.toml", "--json", "--set", "experiment.agent=loud:solve")
    assert ["episodes"] == list(json.loads(done.stdout))
    assert "hello" in done.stderr
