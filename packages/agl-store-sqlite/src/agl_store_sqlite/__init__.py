"""``sqlite:///``: the default store, one durable file. Names are imported on first use, because the plugin is light."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_store_sqlite._names import experiments, rollout_ids
    from agl_store_sqlite._schema import path_of
    from agl_store_sqlite._store import SQLiteStore

__all__ = ["SQLiteStore", "experiments", "path_of", "rollout_ids"]

_HOMES = {"SQLiteStore": "_store", "experiments": "_names", "path_of": "_schema", "rollout_ids": "_names"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
