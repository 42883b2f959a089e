"""A store with partitions passes the conformance class of stores; a new partition begins every few rollouts."""

import asyncio
from collections.abc import Callable

import pytest

from agl_testing.conformance import StoreLocation

from .conftest import PostgresConformance, execute


def locating(factory: str, url_of: Callable[[str], str]) -> Callable[[str], StoreLocation]:
    """Return a function that makes stores by name; in these, every call that enqueues begins a new period."""
    made: dict[str, StoreLocation] = {}

    def located(name: str) -> StoreLocation:
        if name not in made:
            made[name] = location = StoreLocation(factory=factory, url=url_of(name))
            asyncio.run(StoreLocation(factory=factory, url=f"{location.url}&partition=day").open().close())
            execute(location, "UPDATE SCHEMA.partitioning SET unit = 'microseconds'")
        return made[name]

    return located


class TestPartitionedPostgresStore(PostgresConformance):
    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return locating("agl_store_postgres.store:PostgresStore", lambda name: f"{url}_{name}")


class TestPartitionedShards(PostgresConformance):
    @pytest.fixture
    def locate(self, sharded_url: Callable[..., str]) -> Callable[[str], StoreLocation]:
        factory = "agl_store_postgres.sharded_store:ShardedPostgresStore"
        return locating(factory, lambda name: sharded_url(2, name=name))
