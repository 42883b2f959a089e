"""The Redis store passes the conformance class of stores."""

from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest
from redis import Redis

from agl_testing.conformance import StoreConformance, StoreLocation


class TestRedisStore(StoreConformance):
    has_older_schema = False  # there is one layout so far

    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_redis.store:RedisStore", url=f"{url}_{name}")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        put(location, "meta", "version", str(version))

    def damage(self, location: StoreLocation, rollout_id: str, number: int, data: bytes) -> None:
        put(location, f"r/{rollout_id}", str(number or "d"), data)


def put(location: StoreLocation, name: str, field: str, value: str | bytes) -> None:
    parts = urlsplit(location.url)
    prefix = parse_qs(parts.query)["prefix"][0]
    with Redis(host="127.0.0.1", port=parts.port or 0, protocol=2) as client:
        client.hset(f"{{{prefix}}}:{name}", field, value)
