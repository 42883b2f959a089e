"""A store with partitions runs the conformance class that every store runs, with a partition for every few rollouts."""

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from agl.contracts import Store
from agl_store_postgres.urls import SHARDED, sharded_target_of, target_of
from agl_testing.conformance import StoreConformance, StoreLocation


def begin_often(url: str, open_store: Callable[[str], Store]) -> str:
    """Make a store in which every call that enqueues begins a period; return the URL without its option."""

    async def body() -> None:
        await open_store(f"{url}&partition=day").close()

    asyncio.run(body())
    target = sharded_target_of(url).control if url.startswith(SHARDED) else target_of(url)
    with psycopg.connect(target.conninfo, autocommit=True) as connection:
        connection.execute(f"UPDATE {target.schema}.partitioning SET unit = 'microseconds'".encode())
    return url


class TestPartitionedPostgresStore(StoreConformance):
    has_older_schema = False  # the older layouts have no partitions, and test_partitions.py converts one

    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        factory = "agl_store_postgres.store:PostgresStore"
        made: dict[str, StoreLocation] = {}

        def located(name: str) -> StoreLocation:
            if name not in made:
                location = StoreLocation(factory=factory, url=f"{url}_{name}")
                begin_often(location.url, lambda url: StoreLocation(factory=factory, url=url).open())
                made[name] = location
            return made[name]

        return located

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        target = target_of(location.url)
        with psycopg.connect(target.conninfo, autocommit=True) as connection:
            connection.execute(f"UPDATE {target.schema}.agl_schema SET version = {version}".encode())


class TestPartitionedShards(StoreConformance):
    has_older_schema = False

    @pytest.fixture
    def locate(self, sharded_url: Callable[..., str]) -> Callable[[str], StoreLocation]:
        factory = "agl_store_postgres.sharded_store:ShardedPostgresStore"
        made: dict[str, StoreLocation] = {}

        def located(name: str) -> StoreLocation:
            if name not in made:
                location = StoreLocation(factory=factory, url=sharded_url(2, name=name))
                begin_often(location.url, lambda url: StoreLocation(factory=factory, url=url).open())
                made[name] = location
            return made[name]

        return located

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        control = sharded_target_of(location.url).control
        with psycopg.connect(control.conninfo, autocommit=True) as connection:
            connection.execute(f"UPDATE {control.schema}.agl_schema SET version = {version}".encode())
