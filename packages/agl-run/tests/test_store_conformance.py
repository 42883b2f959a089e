"""The SQLite store runs the conformance class that other stores run."""

import sqlite3
from pathlib import Path

import pytest

from agl_run.sqlite._schema import CURRENT
from agl_testing.conformance import StoreConformance, StoreLocation


class TestSQLiteStore(StoreConformance):
    @pytest.fixture
    def location(self, tmp_path: Path) -> StoreLocation:
        return StoreLocation(factory="agl_run.sqlite:SQLiteStore", url=f"sqlite:///{tmp_path}/runs.db")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE agl_schema SET version = {version}")

    def make_older(self, location: StoreLocation) -> None:
        """Layout 1 had no indexes but the one that spans are unique by."""
        names = execute(location, "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        for (name,) in names:
            if name != "spans_by_id":
                execute(location, f"DROP INDEX {name}")
        execute(location, f"UPDATE agl_schema SET version = {CURRENT - 1}")


def execute(location: StoreLocation, statement: str) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(location.url.removeprefix("sqlite:///"))
    rows = connection.execute(statement).fetchall()
    connection.commit()
    connection.close()
    return rows
