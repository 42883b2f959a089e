"""The PostgreSQL store passes the conformance class of stores."""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from agl_testing.conformance import StoreConformance, StoreLocation


class TestPostgresStore(StoreConformance):
    has_older_schema = False  # there is one layout so far

    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_postgres.store:PostgresStore", url=f"{url}_{name}")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE SCHEMA.agl_schema SET version = {version}")


def execute(location: StoreLocation, statement: str, *values: object) -> list[tuple[Any, ...]]:
    base, _, query = location.url.partition("?")
    assert urlsplit(base).hostname
    schema = parse_qs(query)["schema"][0]
    with psycopg.connect(base, autocommit=True) as connection:
        cursor = connection.execute(statement.replace("SCHEMA", schema).encode(), values)
        return cursor.fetchall() if cursor.description else []
