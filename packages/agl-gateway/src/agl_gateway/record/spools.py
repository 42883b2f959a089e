"""Decides whether a gateway needs a spool, and opens the files of its store."""

import asyncio
from collections.abc import Collection
from pathlib import Path

from agl.contracts import Store
from agl.stores import MemoryStore
from agl_gateway.processes.presence import store_identity
from agl_gateway.record.spool_file import SpoolFile, open_spools
from agl_inspect.keys import state_dir
from agl_store_sqlite import SQLiteStore

OFF = "off"


def default_folder() -> Path:
    """Return the folder for spools below the folder of this user's state."""
    return state_dir() / "spool"


def folder_of(choice: str, store: Store) -> Path | None:
    """Return the folder for the spool of a gateway; ``None`` to go without.

    Args:
        choice: A folder, ``off``, or ``""`` for a folder of this user's state where the store is not in this process:
            a SQLite file or memory here takes a call as fast as a spool does, and is not gone while this process runs.
    """
    if choice == OFF or (not choice and isinstance(store, MemoryStore | SQLiteStore)):
        return None
    return Path(choice).expanduser() if choice else default_folder()


async def spools_for(store: Store, choice: str, *, shown: str, without: Collection[Path] = ()) -> list[SpoolFile]:
    """Open the spools of a store that no other process uses, the gateway's own first; none where it goes without.

    Args:
        choice: See :func:`folder_of`.
        shown: The store's address without credentials.
        without: See :func:`open_spools`.

    Raises:
        ConfigError: The folder cannot be used.
        StoreError: The store does not answer, and its identity is not known.
    """
    folder = folder_of(choice, store)
    if folder is None:
        return []
    store_id = await store_identity(store)
    return await asyncio.to_thread(open_spools, folder, store_id=store_id, store_url=shown, without=without)


def left_text(calls: int, path: Path | None) -> str:
    """Return the last words of a gateway whose store did not take all calls."""
    return (
        f"{calls} calls stay in the spool {path}, because the store does not answer; the next gateway that starts on "
        "this machine with the same store and spool brings them there"
    )
