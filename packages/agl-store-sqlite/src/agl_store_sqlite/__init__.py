"""``sqlite:///``: the default store, one durable file."""

from agl_store_sqlite._names import experiments, rollout_ids
from agl_store_sqlite._schema import path_of
from agl_store_sqlite._store import SQLiteStore

__all__ = ["SQLiteStore", "experiments", "path_of", "rollout_ids"]
