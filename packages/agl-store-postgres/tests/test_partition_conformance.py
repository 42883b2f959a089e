"""A store with partitions passes the conformance class of stores; a new partition begins every few rollouts."""

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from agl_store_postgres.urls import SHARDED, sharded_target_of, target_of
from agl_testing.conformance import StoreConformance, StoreLocation


def locating(factory: str, url_of: Callable[[str], str]) -> Callable[[str], StoreLocation]:
    """Return a function that makes stores by name; in these, every call that enqueues begins a new period."""
    made: dict[str, StoreLocation] = {}

    def located(name: str) -> StoreLocation:
        if name not in made:
            made[name] = location = StoreLocation(factory=factory, url=url_of(name))
            asyncio.run(StoreLocation(factory=factory, url=f"{location.url}&partition=day").open().close())
            execute(location, "UPDATE {}.partitioning SET unit = 'microseconds'")
        return made[name]

    return located


def execute(location: StoreLocation, statement: str) -> None:
    """Run a statement on the store, or on the control server of a sharded store; ``{}`` stands for the schema."""
    is_sharded = location.url.startswith(SHARDED)
    target = sharded_target_of(location.url).control if is_sharded else target_of(location.url)
    with psycopg.connect(target.conninfo, autocommit=True) as connection:
        connection.execute(statement.format(f'"{target.schema}"').encode())


class TestPartitionedPostgresStore(StoreConformance):
    has_older_schema = False  # there is one layout so far

    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return locating("agl_store_postgres.store:PostgresStore", lambda name: f"{url}_{name}")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE {{}}.agl_schema SET version = {version}")


class TestPartitionedShards(StoreConformance):
    has_older_schema = False

    @pytest.fixture
    def locate(self, sharded_url: Callable[..., str]) -> Callable[[str], StoreLocation]:
        factory = "agl_store_postgres.sharded_store:ShardedPostgresStore"
        return locating(factory, lambda name: sharded_url(2, name=name))

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, f"UPDATE {{}}.agl_schema SET version = {version}")
