"""Opens the store that a command reads: the named one, or the only one in ``runs/``."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl_inspect.stores.opening import build_store
from agl_inspect.stores.urls import SQLITE, as_url, refuse_directory, stores_in

T = TypeVar("T")

store_option = click.option(
    "--store",
    "store_url",
    envvar="AGL_STORE",
    help="URL of the store, or a SQLite file; by default $AGL_STORE, or the only runs/*.db.",
)
"""Adds the option ``--store`` to a command, as its argument ``store_url``; for :func:`with_store`."""


def with_store(manager: PluginManager, url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store, do the work, close the store."""
    found = resolve_url(url)

    result: list[T] = []

    async def use() -> None:
        store = build_store(manager, found)
        try:
            result.append(await work(store))
        finally:
            await store.close()

    asyncio.run(use())  # what a main coroutine returns is written out by Python, and thrown away, as it ends
    return result[0]


def new_store(manager: PluginManager, url: str, *, other_than: str) -> Store:
    """Open a store to write to, which may be a new one; raises :class:`ConfigError` for the store ``other_than``."""
    found = as_url(url)
    refuse_directory(found, Path())
    if _place(found) == _place(other_than):
        raise ConfigError(f"{url} is the store to copy from; name another one to copy to")
    return build_store(manager, found)


def _place(url: str) -> str:
    return str(Path(url.removeprefix(SQLITE)).resolve()) if url.startswith(SQLITE) else url


def resolve_url(url: str | None, folder: Path = Path()) -> str:
    """Return the store's URL; raises :class:`ConfigError` for a missing file, because reading must not create it."""
    if not url:
        return _only_file(folder)
    url = as_url(url)
    refuse_directory(url, folder)
    path = folder / url.removeprefix(SQLITE)
    if url.startswith(SQLITE) and not path.exists():
        raise ConfigError(
            f"there is no store {str(path)!r}; correct its path (in --store, AGL_STORE, or FROM), "
            "or run an experiment first"
        )
    return url


def _only_file(folder: Path) -> str:
    files = stores_in(folder)
    if not files:
        raise ConfigError(
            "nothing is recorded in this folder yet (found 0 of runs/*.db); run an experiment here, or name a store "
            f"with --store {SQLITE}PATH or AGL_STORE"
        )
    if len(files) != 1:
        found = f"found {len(files)} of runs/*.db" + "".join(f", {file.name}" for file in files[:5])
        raise ConfigError(
            f"which store? {found}; name one with --store {SQLITE}{files[0].as_posix()}, or set AGL_STORE"
        )
    return f"{SQLITE}{files[0]}"
