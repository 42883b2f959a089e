"""The PostgreSQL store runs the conformance class that every store runs, with no flag lowered."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from agl_testing.conformance import StoreConformance, StoreLocation
from agl_testing.stores.older_layout import narrow_numbers, older_states


class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_postgres.store:PostgresStore", url=f"{url}_{name}")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE SCHEMA.agl_schema SET version = {version}")

    def make_older(self, location: StoreLocation) -> None:
        """Layout 1 had no indexes but those that make values unique, and layout 2 kept everything as states."""
        states = asyncio.run(_older_states(location))
        for statement in narrow_numbers("SCHEMA."):
            execute(location, statement)
        execute(location, "UPDATE SCHEMA.spans SET attempt = (attempt >> 14 << 8) + (attempt & 255)")
        names = execute(
            location,
            "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
            "WHERE c.relnamespace = 'SCHEMA'::regnamespace AND NOT i.indisunique",
        )
        assert len(names) >= 9
        for (name,) in names:
            execute(location, f"DROP INDEX SCHEMA.{name}")
        execute(location, "DROP TABLE SCHEMA.documents")
        execute(location, "ALTER TABLE SCHEMA.metrics DROP COLUMN run, DROP COLUMN experiment_step")  # and the key
        execute(location, "ALTER TABLE SCHEMA.metrics ADD PRIMARY KEY (experiment, algorithm, step, name)")
        execute(location, 'CREATE TABLE SCHEMA.states (key text COLLATE "C" PRIMARY KEY, value bytea NOT NULL)')
        for state in states.items():
            execute(location, "INSERT INTO SCHEMA.states VALUES (%s, %s)", *state)
        execute(location, "UPDATE SCHEMA.agl_schema SET version = 1")


async def _older_states(location: StoreLocation) -> dict[str, bytes]:
    store = location.open()
    states = await older_states(store, ledger=("e", 2, "a"))
    await store.close()
    return states


def execute(location: StoreLocation, statement: str, *values: object) -> list[tuple[Any, ...]]:
    base, _, query = location.url.partition("?")
    assert urlsplit(base).hostname
    schema = parse_qs(query)["schema"][0]
    with psycopg.connect(base, autocommit=True) as connection:
        cursor = connection.execute(statement.replace("SCHEMA", schema).encode(), values)
        return cursor.fetchall() if cursor.description else []
