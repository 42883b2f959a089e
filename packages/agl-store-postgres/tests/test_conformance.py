"""The PostgreSQL store runs the conformance class that every store runs, with no flag lowered."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from agl_store_postgres.layout import CURRENT
from agl_testing.conformance import StoreConformance, StoreLocation


class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def location(self, url: str) -> StoreLocation:
        return StoreLocation(factory="agl_store_postgres.store:PostgresStore", url=url)

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE SCHEMA.agl_schema SET version = {version}")

    def make_older(self, location: StoreLocation) -> None:
        """Layout 1 had no indexes but those that make values unique."""
        names = execute(
            location,
            "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
            "WHERE c.relnamespace = 'SCHEMA'::regnamespace AND NOT i.indisunique",
        )
        assert len(names) >= 9
        for (name,) in names:
            execute(location, f"DROP INDEX SCHEMA.{name}")
        execute(location, f"UPDATE SCHEMA.agl_schema SET version = {CURRENT - 1}")


def execute(location: StoreLocation, statement: str) -> list[tuple[Any, ...]]:
    base, _, query = location.url.partition("?")
    assert urlsplit(base).hostname
    schema = parse_qs(query)["schema"][0]
    with psycopg.connect(base, autocommit=True) as connection:
        cursor = connection.execute(statement.replace("SCHEMA", schema).encode())
        return cursor.fetchall() if cursor.description else []
