"""The shell completes ids and names from the folder's store, quickly, and prints nothing without a store."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from agl import Rollout
from agl_inspect.terminal.program import cli
from agl_store_sqlite._names import experiments, rollout_ids
from agl_store_sqlite._store import SQLiteStore


def fill(path: Path, rollouts: list[Rollout]) -> None:
    async def write() -> None:
        store = SQLiteStore(f"sqlite:///{path}")
        await store.enqueue(rollouts)
        await store.close()

    asyncio.run(write())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a store of two experiments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    names = [("calc", 0), ("calc", 1), ("sql", 0)]
    fill(
        tmp_path / "runs/agl.db",
        [Rollout(rollout_id=f"{name}-{at}", task=at, experiment=name) for name, at in names],
    )
    return tmp_path


def complete(*words: str) -> list[str]:
    """Return the suggestions for the last of ``words``."""
    found = ShellComplete(cli, {}, "agl", "_AGL_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


def ask(folder: Path, words: str) -> tuple[int, str, str]:
    """Run the program as click's completion script does; return its exit status, output and errors."""
    asked = {"_AGL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
    line = [sys.executable, "-P", "-m", "agl"]
    done = subprocess.run(line, cwd=folder, env=os.environ | asked, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip(), done.stderr


def test_shell_gets_the_suggestions_and_nothing_else(folder):
    assert (0, "plain,calc-0\nplain,calc-1", "") == ask(folder, "agl show ca")


def test_shell_hears_of_no_error(folder):
    (folder / "runs/agl.db").write_bytes(b"no database" * 100)
    assert (0, "", "") == ask(folder, "agl show ")


@pytest.mark.parametrize(
    "words",
    [("show",), ("why",), ("replay",), ("data", "export"), ("data", "export", "calc-0"), ("runs", "rm")],
    ids=" ".join,
)
def test_ids_are_completed(words, folder):
    assert ["latest", "calc-0", "calc-1", "sql-0"] == complete(*words, "")
    assert ["calc-0", "calc-1"] == complete(*words, "ca")


def test_beginning_of_latest_is_completed(folder):
    assert ["latest"] == complete("show", "la")


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "--experiment"),
        ("runs", "gc", "--experiment"),
        ("sql", "--experiment"),
        ("metrics",),
        ("data", "copy", "--experiment"),
    ],
    ids=" ".join,
)
def test_experiments_are_completed(words, folder):
    assert ["calc", "sql"] == complete(*words, "")
    assert ["sql"] == complete(*words, "s")


def test_named_store_is_the_one_that_is_read(folder):
    fill(folder / "other.db", [Rollout(rollout_id="other-0", task=0)])
    assert ["latest", "other-0"] == complete("show", "--store", "other.db", "")


def files(folder: Path) -> list[str]:
    """Return the names of the files below a folder, without SQLite's log files, which reading creates too."""
    return sorted(path.name for path in folder.rglob("*") if not path.name.endswith(("-shm", "-wal")))


@pytest.mark.parametrize("state", ["empty", "no store", "broken", "several"])
def test_nothing_is_suggested_without_a_readable_store(state, folder):
    store = folder / "runs/agl.db"
    if state == "several":
        fill(folder / "runs/b.db", [])
    else:
        store.unlink()
    if state == "empty":
        fill(store, [])
    elif state == "broken":
        store.write_bytes(b"no database" * 100)
    before = files(folder)
    assert [] == complete("show", "")
    assert before == files(folder)


def test_names_of_a_large_store_are_found_quickly(tmp_path):
    store = tmp_path / "large.db"
    fill(store, [Rollout(rollout_id=f"e{at % 5}-{at:06}", task=0, experiment=f"e{at % 5}") for at in range(30_000)])
    began = time.process_time()
    assert 100 == len(rollout_ids(store, "e3", limit=100))
    assert ["e0", "e1", "e2", "e3", "e4"] == experiments(store, "", limit=100)
    assert time.process_time() - began < 0.05
