"""Every export, the archive and every command that reads runs leave out a damaged record, and write the others."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl import PluginManager
from agl.contracts import ExperimentRecord
from agl_data.export.command import FORMATS
from agl_data.export.formats import formats_of
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

from .archive.conftest import record, record_context

MANAGER = PluginManager.from_environment()
OF_RUNS = [name for name in FORMATS if name not in ("text", "json", "python", "model", "gguf")]
NAMES = [*OF_RUNS, *(each.name for each in formats_of(MANAGER))]
EXPORTS = [
    ("data", "export", *(("--output", "out.parquet") if name == "trl" else ()), "--format", name) for name in NAMES
]
READS = [
    *(("runs", *more) for more in ((), ("--sort", "reward"), ("--sort", "finished"), ("--experiment", "sums"))),
    *(("show", name) for name in ("sums-000", "sums-002", "latest")),
    *(("why", name) for name in ("sums-000", "sums-002")),
    *(("sql", f"select count(*) from {table}") for table in ("rollouts", "calls", "rewards")),
    *(("data", "archive", "archived"), ("data", "copy", "runs/agl.db", "copy.db"), ("runs", "gc", "--keep", "1")),
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that records four rollouts in ``runs/agl.db``, and damages one and a span of another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)

    async def fill() -> None:
        opened = SQLiteStore("sqlite:///runs/agl.db")
        await record_context(opened)
        await record(opened)
        await opened.close()

    def make() -> None:
        asyncio.run(fill())
        with closing(sqlite3.connect("runs/agl.db")) as database:
            database.execute("UPDATE rollouts SET data = x'c1' WHERE rollout_id = 'sums-001'")
            database.execute("UPDATE spans SET data = x'c1' WHERE key >> 38 = 3 AND key & 0xffffff = 1")
            database.commit()

    return make


@pytest.fixture
def damaged_parts(store: Callable[[], None]) -> None:
    """Record the rollouts, and damage one, a span of the next and an attempt of the last."""
    store()
    with closing(sqlite3.connect("runs/agl.db")) as database:
        database.execute("UPDATE attempts SET data = x'c1' WHERE id >> 14 = 4 AND id & 16383 = 1")
        database.commit()


def rows(path: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of attempts and spans of each rollout of a store."""
    with closing(sqlite3.connect(path)) as database:
        return {
            name: (attempts, spans)
            for name, attempts, spans in database.execute(
                "SELECT rollout_id, (SELECT count(*) FROM attempts WHERE id >> 14 = seq), "
                "(SELECT count(*) FROM spans WHERE key >> 38 = seq) FROM rollouts"
            )
        }


def run(*words: str) -> str:
    done = CliRunner().invoke(cli, [*words], obj=MANAGER)
    assert (0, None) == (done.exit_code, done.exception), done.output
    return done.stdout


@pytest.mark.usefixtures("damaged_parts")
def test_archive_removes_nothing_that_it_could_not_read() -> None:
    before = rows("runs/agl.db")
    shown = run("data", "archive", "archived", "--remove")
    assert "archived 1 rollout" in shown
    assert "left out 2 rollouts with damaged attempts or spans: sums-002, sums-003" in shown
    assert {each: before[each] for each in ("sums-001", "sums-002", "sums-003")} == rows("runs/agl.db")
    run("data", "restore", "archived", "--store", "restored.db")
    assert {"sums-000": before["sums-000"]} == rows("restored.db")


@pytest.mark.usefixtures("damaged_parts")
def test_copy_leaves_out_damaged_rollouts_and_names_them() -> None:
    before = rows("runs/agl.db")
    shown = run("data", "copy", "runs/agl.db", "copy.db")
    assert "left out 2 rollouts with damaged attempts or spans: sums-002, sums-003" in shown
    assert shown.endswith("copied 1 experiment, 1 rollout\n")
    assert {"sums-000": before["sums-000"]} == rows("copy.db")


@pytest.mark.usefixtures("damaged_parts")
def test_damaged_rollouts_are_removed_by_id_and_named() -> None:
    done = CliRunner().invoke(cli, ["show", "sums-001"], obj=MANAGER)
    assert "agl runs rm removes it" in done.output
    shown = run("runs", "rm", "sums-001", "sums-002", "sums-001")
    assert "removed 2 rollouts, 1 of them damaged: sums-001\n" == shown
    assert ["sums-000", "sums-003"] == sorted(rows("runs/agl.db"))
    assert "removed 1 rollout\n" == run("runs", "rm", "sums-003")


@pytest.mark.usefixtures("damaged_parts")
def test_damaged_rollout_is_removed_only_by_force_while_an_experiment_is_unfinished() -> None:
    async def begin() -> None:
        opened = SQLiteStore("sqlite:///runs/agl.db")
        await opened.save_state({}, experiment=ExperimentRecord(name="other"))
        await opened.close()

    asyncio.run(begin())
    done = CliRunner().invoke(cli, ["runs", "rm", "sums-001"], obj=MANAGER)
    assert (1, True) == (done.exit_code, "pass --force" in done.output)
    assert "sums-001" in rows("runs/agl.db")
    assert "removed 1 rollout, 1 of them damaged: sums-001\n" == run("runs", "rm", "--force", "sums-001")


@pytest.mark.usefixtures("damaged_parts")
def test_attempt_with_a_damaged_span_has_no_reward_and_does_not_train() -> None:
    with closing(sqlite3.connect("runs/agl.db")) as database:  # the deciding attempt's reward
        database.execute(
            "UPDATE spans SET data = x'c1' WHERE key >> 38 = 1 AND (key >> 24) & 16383 = 2 AND key & 3 = 2"
        )
        database.commit()
    assert "no reward: 1 span of the attempt cannot be read." in run("why", "sums-000")
    exported = [json.loads(line) for line in run("data", "export", "--format", "transitions").splitlines()]
    assert {"not_final": None, "unreadable": None} == {
        each["reject"]: each["episode_reward"] for each in exported if each["rollout_id"] == "sums-000"
    }


@pytest.mark.parametrize("words", [*READS, *EXPORTS], ids=" ".join)
def test_damaged_records_hide_no_others(store: Callable[[], None], words: tuple[str, ...]) -> None:
    store()
    done = CliRunner().invoke(cli, [*words], obj=MANAGER)
    assert (0, None) == (done.exit_code, done.exception), done.output
    assert "sums-001" not in done.stdout
    assert "sums-003" in done.stdout or words[-1] not in ("runs", "transitions", "spans")
