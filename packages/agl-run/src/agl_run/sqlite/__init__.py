"""``sqlite:///``: the default store, one durable file."""

from agl_run.sqlite._store import SQLiteStore

__all__ = ["SQLiteStore"]
