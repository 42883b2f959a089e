"""Every export, the archive and every command that reads runs leave out a damaged record, and write the others."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl import PluginManager
from agl_data.export.command import FORMATS
from agl_data.export.formats import formats_of
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

from .archive.conftest import record, record_context

MANAGER = PluginManager.from_environment()
OF_RUNS = [name for name in FORMATS if name not in ("text", "json", "python", "model")]
EXPORTS = [("data", "export", "--format", name) for name in (*OF_RUNS, *(each.name for each in formats_of(MANAGER)))]
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


@pytest.mark.parametrize("words", [*READS, *EXPORTS], ids=" ".join)
def test_damaged_records_hide_no_others(store: Callable[[], None], words: tuple[str, ...]) -> None:
    store()
    done = CliRunner().invoke(cli, [*words], obj=MANAGER)
    assert (0, None) == (done.exit_code, done.exception), done.output
    assert "sums-001" not in done.stdout
    assert "sums-003" in done.stdout or words[-1] not in ("runs", "transitions", "spans")
