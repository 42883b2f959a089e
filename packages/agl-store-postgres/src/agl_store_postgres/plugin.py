"""Registers the store; imports nothing of it."""

from collections.abc import Iterable

from agl import StoreEntry, hookimpl


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """One store under both schemes that PostgreSQL's own programs take."""
    for scheme in ("postgresql", "postgres"):
        yield StoreEntry(
            name=scheme,
            factory="agl_store_postgres.store:PostgresStore",
            summary="one PostgreSQL schema, for many machines",
        )
