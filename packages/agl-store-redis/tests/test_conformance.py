"""The Redis store runs the conformance class that every store runs."""

from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from redis import Redis

from agl_testing.conformance import StoreConformance, StoreLocation


class TestRedisStore(StoreConformance):
    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_redis.store:RedisStore", url=f"{url}_{name}")

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        parts = urlsplit(location.url)
        prefix = parse_qs(parts.query)["prefix"][0]
        with Redis(host="127.0.0.1", port=parts.port or 0, protocol=2) as client:
            client.hset(f"{{{prefix}}}:meta", "version", str(version))

    def make_older(self, location: StoreLocation) -> None:
        """Layout 1 had no statistics and no tallies."""
        parts = urlsplit(location.url)
        base = f"{{{parse_qs(parts.query)['prefix'][0]}}}:"
        with Redis(host="127.0.0.1", port=parts.port or 0, protocol=2) as client:
            for name in client.smembers(f"{base}stn"):
                client.delete(f"{base}st/{name.decode()}")
            client.delete(f"{base}stn")
            for key in client.keys(f"{base}r/*"):
                for field, data in client.hgetall(key).items():
                    if field.isdigit():
                        attempt = {k: v for k, v in msgspec.msgpack.decode(data).items() if k != "tally"}
                        client.hset(key, field, msgspec.msgpack.encode(attempt))
        self.set_schema_version(location, 1)
