"""``agl data archive`` and ``agl data restore``, as users call them."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl import PluginManager
from agl.errors import ConfigError
from agl.schemas import Reward
from agl_data.archive.command import archive, restore
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import invoke_agl

from .conftest import record, record_context, span


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a store of four rollouts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)

    async def fill() -> None:
        store = SQLiteStore("sqlite:///runs/agl.db")
        await record_context(store)
        await record(store)
        await store.close()

    asyncio.run(fill())
    return tmp_path


def run(command, *words: str) -> Result:
    done = CliRunner().invoke(command, words, obj=PluginManager.from_environment(), catch_exceptions=False)
    assert 0 == done.exit_code, done.output
    return done


@pytest.mark.long
def test_both_are_commands_of_agl_runs(folder):
    assert "archived 4 rollouts of 1 experiment" in invoke_agl("data", "archive", "kept", "--remove", folder=folder)
    assert "restored 4 rollouts of 1 experiment\n" in invoke_agl("data", "restore", "kept", folder=folder)


def test_archive_without_pyarrow_names_the_package_to_install(folder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("agl_data.archive.") and "command" not in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need one more package; run: pip install .*agl-data\[parquet\]"):
        run(archive, "kept")


def test_archive_reports_what_it_did(folder):
    first, second = run(archive, "kept").stdout.splitlines(), run(archive, "kept").stdout.splitlines()
    assert first[0].startswith("archived 4 rollouts of 1 experiment (0.0 MiB)")
    assert "bring them back with: agl data restore kept" == first[1]
    expected = ["archived 0 rollouts of 1 experiment", "4 rollouts in the archive already: not written again"]
    assert expected == second


def test_archive_names_the_rollouts_that_changed(folder):
    run(archive, "kept")

    async def change() -> None:
        store = SQLiteStore("sqlite:///runs/agl.db")
        await store.append_spans([span("sums-002", "sums-002.2", 9, name="late", reward=Reward(value=1.0))])
        await store.close()

    asyncio.run(change())
    done = run(archive, "kept", "--remove").stdout
    assert "read back and compared, and removed from the store: 3 rollouts\n" in done
    assert "the store has" in done
    assert "kept 1 rollout that changed after the archiving, such as by a late reward: sums-002; archive them" in done


def test_archive_names_the_rollouts_of_another_run_and_no_password(folder):
    url = f"memory://me:secret@kept{folder}"

    async def again() -> None:
        store = SQLiteStore("sqlite:///runs/agl.db")
        await store.delete(["sums-002"])
        await record(store, ids=[2])
        await store.close()

    first = run(archive, url).stdout
    asyncio.run(again())
    assert "secret" not in first
    assert "1 rollout of another run, whose id the archive has already: sums-002; archive" in run(archive, url).stdout


def test_results_are_json_for_programs(folder):
    done = json.loads(run(archive, "kept", "--remove", "--json").stdout)
    assert (4, 4, [], False) == (done["rollouts"], done["removed"], done["changed"], done["is_dry_run"])
    assert 0 < done["compaction"]["before"]
    expected = {"experiments": ["sums"], "rollouts": 4, "known": 0}
    assert expected == json.loads(run(restore, "kept", "--json").stdout)


def test_restore_makes_a_new_store_only_for_an_archive(folder):
    with pytest.raises(ConfigError, match="kept is not an archive"):
        run(restore, "kept", "--store", "new.db")
    assert not Path("new.db").exists()
    run(archive, "kept")
    expected = ["would restore 4 rollouts of 1 experiment"]
    assert expected == run(restore, "kept", "--dry-run", "--store", "new.db").stdout.splitlines()
    assert not Path("new.db").exists()
    assert "look with: agl runs --store new.db" in run(restore, "kept", "--store", "new.db").stdout
    assert "4 rollouts in the store already: not written again" in run(restore, "kept", "--store", "new.db").stdout
