"""A sharded store passes the conformance class of stores, with one shard, two and three."""

from collections.abc import Callable

import psycopg
import pytest

from agl_store_postgres.urls import sharded_target_of
from agl_testing.conformance import StoreConformance, StoreLocation


@pytest.fixture(params=[1, 2, 3])
def shards(request: pytest.FixtureRequest) -> int:
    return request.param


class TestShardedPostgresStore(StoreConformance):
    has_older_schema = False  # there is one layout so far

    @pytest.fixture
    def locate(self, sharded_url: Callable[..., str], shards: int) -> Callable[[str], StoreLocation]:
        factory = "agl_store_postgres.sharded_store:ShardedPostgresStore"
        return lambda name: StoreLocation(factory=factory, url=sharded_url(shards, name=name))

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        control = sharded_target_of(location.url).control
        with psycopg.connect(control.conninfo, autocommit=True) as connection:
            connection.execute(f"UPDATE {control.schema}.agl_schema SET version = {version}".encode())
