"""The SQLite store passes the conformance class of stores."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_testing.conformance import StoreConformance, StoreLocation


class TestSQLiteStore(StoreConformance):
    has_older_schema = False  # there is one layout so far

    @pytest.fixture
    def locate(self, tmp_path: Path) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_sqlite:SQLiteStore", url=f"sqlite:///{tmp_path}/{name}.db")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE agl_schema SET version = {version}")

    def damage(self, location: StoreLocation, rollout_id: str, number: int, data: bytes) -> None:
        seq = "SELECT seq FROM rollouts WHERE rollout_id = ?"
        where = (
            f"attempts SET data = ? WHERE id = ({seq}) << 14 | ?"
            if number
            else f"rollouts SET data = ? WHERE seq = ({seq}) | ?"
        )
        execute(location, f"UPDATE {where}", data, rollout_id, number)


def execute(location: StoreLocation, statement: str, *values: object) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(location.url.removeprefix("sqlite:///"))
    rows = connection.execute(statement, values).fetchall()
    connection.commit()
    connection.close()
    return rows
