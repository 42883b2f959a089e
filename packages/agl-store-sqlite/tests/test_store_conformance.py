"""The SQLite store runs the conformance class that other stores run."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_testing.conformance import StoreConformance, StoreLocation
from agl_testing.stores.older_layout import narrow_numbers, older_states


class TestSQLiteStore(StoreConformance):
    @pytest.fixture
    def locate(self, tmp_path: Path) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_sqlite:SQLiteStore", url=f"sqlite:///{tmp_path}/{name}.db")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE agl_schema SET version = {version}")

    def make_older(self, location: StoreLocation) -> None:
        """Layout 1 had no indexes but the one that spans are unique by, and layout 2 kept everything as states."""
        states = asyncio.run(_older_states(location))
        for statement in narrow_numbers():
            execute(location, statement)
        execute(location, "UPDATE spans SET key = (key >> 38 << 32) + (key & 4294967295)")
        names = execute(location, "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        for (name,) in names:
            if name != "spans_by_id":
                execute(location, f"DROP INDEX {name}")
        execute(location, "DROP TABLE documents")
        columns = "experiment, algorithm, step, name, value, time"
        execute(location, f"CREATE TABLE metrics_of_one_run AS SELECT {columns} FROM metrics")
        execute(location, "DROP TABLE metrics")
        execute(location, "ALTER TABLE metrics_of_one_run RENAME TO metrics")
        execute(location, "CREATE TABLE states (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        for state in states.items():
            execute(location, "INSERT INTO states VALUES (?, ?)", *state)
        execute(location, "UPDATE agl_schema SET version = 1")


async def _older_states(location: StoreLocation) -> dict[str, bytes]:
    store = location.open()
    states = await older_states(store, ledger=("e", 2, "a"))
    await store.close()
    return states


def execute(location: StoreLocation, statement: str, *values: object) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(location.url.removeprefix("sqlite:///"))
    rows = connection.execute(statement, values).fetchall()
    connection.commit()
    connection.close()
    return rows
