"""Commands that messages propose work when pasted, because they repeat the store, overrides and options in use."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from agl.stores import MemoryStore
from agl_inspect import stores
from agl_inspect.stores import without_password
from agl_inspect.terminal.program import cli
from agl_run.cli.run import run, run_again
from agl_store_sqlite._store import SQLiteStore

AGENT = """
import os, signal, time

def solve(task):
    if task == os.environ.get("STOPS_AT"):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)  # until the run has stopped
    if task == os.environ.get("FAILS_AT"):
        raise ValueError("no answer")
    return 1.0
"""

FILE = """
[experiment]
name = "small"
agent = "pasted_agent:solve"
train = "train.jsonl"
store = "sqlite:///records/a b.db"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AGL_STORE", raising=False)
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pasted_agent.py").write_text(AGENT)
    (tmp_path / "train.jsonl").write_text('"a"\n"b"\n')
    (tmp_path / "e.toml").write_text(FILE)
    return tmp_path


def agl(*words: str) -> Any:
    return CliRunner().invoke(cli, words)


def pasted(command: str) -> Any:
    words = shlex.split(command)
    assert "agl" == words[0]
    return agl(*words[1:])


def proposed(output: str) -> list[str]:
    """Return the commands in an output: ``agl`` and the text up to a comma, a semicolon or the end of the line."""
    return re.findall(r"(?:: |, )(agl [-a-z].*?)(?=, agl |\. |;|$)", output, re.MULTILINE)


def test_closing_lines_name_commands_that_find_the_store(folder: Path) -> None:
    done = agl("run", "e.toml", "-q")
    commands = proposed(done.output)
    assert 4 == len(commands), done.output
    for command in commands:
        result = pasted(command)
        assert 0 == result.exit_code, (command, result.output)
    assert (folder / "runs.jsonl").exists()


def test_stopped_run_is_continued_with_the_options_it_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOPS_AT", "b")
    words = ("--set", "experiment.workdir=work here", "--set", "experiment.store=sqlite:///other.db", "--quiet")
    stopped = agl("--no-plugins", "run", "e.toml", *words)
    (command,) = proposed(stopped.output)
    assert f"agl --no-plugins run e.toml {shlex.join(words)} --resume" == command
    monkeypatch.delenv("STOPS_AT")
    assert 0 == pasted(command).exit_code
    assert (folder / "other.db").exists()


def test_stopped_run_is_continued_with_its_console() -> None:
    with click.Context(run, parent=click.Context(cli)) as context:
        context.params = {"has_console": True, "quiet": False}
        assert "agl run e.toml --console --resume" == run_again(Path("e.toml"), (), "--resume")


def test_check_proposes_the_run_that_it_checked(folder: Path) -> None:
    del folder
    (command,) = proposed(agl("check", "e.toml", "--set", "experiment.workdir=work here").output)
    assert "agl run e.toml --set 'experiment.workdir=work here'" == command
    assert 0 == pasted(command).exit_code


@pytest.mark.parametrize("fails", ["a", "ab"])
def test_report_of_failed_rollouts_names_a_command_that_finds_them(
    folder: Path, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAILS_AT", fails[0])
    if fails == "ab":
        (folder / "train.jsonl").write_text('"a"\n')
    said = agl("run", "e.toml", "-q").output + caplog.text
    (command,) = proposed(said[said.index("Look at one with") :])
    assert "no answer" in pasted(command).output


@pytest.mark.parametrize("store", ["records/x.db", "sqlite:///runs/other.db"])
def test_recorded_program_is_shown_by_the_proposed_command(folder: Path, store: str) -> None:
    (folder / "runs").mkdir()
    SQLiteStore(f"sqlite:///{folder / 'runs/first.db'}")
    done = agl("exec", "--store", store, "--", sys.executable, "-c", "")
    (command,) = [each for each in proposed(done.output) if "show" in each]
    assert 0 == pasted(command).exit_code, command


def test_command_names_no_store_that_it_finds_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runs").mkdir()
    url = f"sqlite:///{folder / 'runs/only.db'}"
    SQLiteStore(url)
    assert "agl show latest" == stores.command("show", "latest", store_url=url)
    monkeypatch.setenv("AGL_STORE", "other.db")
    assert "agl show latest --store runs/only.db" == stores.command("show", "latest", store_url=url)
    monkeypatch.setenv("AGL_STORE", "runs/only.db")
    assert "agl show latest" == stores.command("show", "latest", store_url=url)


def test_command_has_no_password_and_none_is_proposed_for_a_store_in_memory() -> None:
    given = "postgresql://ann:secret@db:5432/agl?password=secret&schema=x"
    assert "postgresql://ann@db:5432/agl?schema=x" == without_password(given)
    assert "http://host:4748" == without_password("http://:token@host:4748")
    memory = stores.address_of(MemoryStore())
    assert "" == stores.proposal("See", "show", "x", store_url=memory)
