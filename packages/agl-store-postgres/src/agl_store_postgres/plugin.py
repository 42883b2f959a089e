"""Registers the PostgreSQL store by import path, without importing it."""

from collections.abc import Iterable

from agl import StoreEntry, hookimpl


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Registers the store under both URL schemes of PostgreSQL's own programs, and the one in shards."""
    for scheme in ("postgresql", "postgres"):
        yield StoreEntry(
            name=scheme,
            factory="agl_store_postgres.store:PostgresStore",
            summary="one PostgreSQL schema, for many machines",
        )
    yield StoreEntry(
        name="postgresql+shards",
        factory="agl_store_postgres.sharded_store:ShardedPostgresStore",
        summary="spans on several PostgreSQL servers, everything else on one",
    )
