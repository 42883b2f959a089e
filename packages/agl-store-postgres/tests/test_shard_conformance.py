"""A sharded store passes the conformance class of stores, with one shard, two and three."""

from collections.abc import Callable

import pytest

from agl_testing.conformance import StoreLocation

from .conftest import PostgresConformance


@pytest.fixture(params=[1, 2, 3])
def shards(request: pytest.FixtureRequest) -> int:
    return request.param


class TestShardedPostgresStore(PostgresConformance):
    @pytest.fixture
    def locate(self, sharded_url: Callable[..., str], shards: int) -> Callable[[str], StoreLocation]:
        factory = "agl_store_postgres.sharded_store:ShardedPostgresStore"
        return lambda name: StoreLocation(factory=factory, url=sharded_url(shards, name=name))
