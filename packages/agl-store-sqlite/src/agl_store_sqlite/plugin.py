"""Registers the SQLite store by import path, without importing it."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import StoreEntry


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Register the store in one SQLite file."""
    yield StoreEntry(name="sqlite", factory="agl_store_sqlite:SQLiteStore", summary="one durable file, the default")
