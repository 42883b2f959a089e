"""Registers the Redis store by import path, without importing it."""

from collections.abc import Iterable

from agl import StoreEntry, hookimpl


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Registers the store under the URL schemes of both servers, with TLS and without."""
    for scheme in ("redis", "rediss", "valkey", "valkeys"):
        yield StoreEntry(
            name=scheme,
            factory="agl_store_redis.store:RedisStore",
            summary="one prefix of a Redis or Valkey server, for many machines",
        )
