"""Renders the commands that messages propose, so that they work when they are pasted into the same shell.

A command names the store unless it would find that by itself, in ``AGL_STORE`` or as the only one in ``runs/``.
Passwords are left out: PostgreSQL takes them from ``PGPASSWORD`` or a password file, a served store from ``AGL_TOKEN``.
"""

import os
import shlex
from pathlib import Path

from agl.contracts import Store
from agl.stores import TableStore
from agl_inspect.stores.urls import SQLITE, as_url, stores_in, without_password

MEMORY = "memory:"


def command(*words: str, store_url: str = "") -> str:
    """Return ``agl WORDS``, quoted for a shell, with ``--store`` where the command needs it; see :func:`address_of`."""
    return shlex.join(("agl", *words, *_store_option(store_url)))


def proposal(lead: str, *words: str, store_url: str) -> str:
    """Return ``" LEAD: agl WORDS"`` to append to a message, ``""`` for a store that ends with its process."""
    return "" if store_url.startswith(MEMORY) else f" {lead}: {command(*words, store_url=store_url)}"


def address_of(store: Store) -> str:
    """Return the URL of a store object without passwords, ``""`` where it does not say."""
    return store.backend.shown_url if isinstance(store, TableStore) else ""


def _store_option(url: str) -> tuple[str, ...]:
    found = _found_without_option()
    if not url or url.startswith(MEMORY) or (found is not None and _place(found) == _place(url)):
        return ()
    return ("--store", _short(without_password(url)))


def _found_without_option() -> str | None:
    """Return the URL of the store that commands read here without ``--store``."""
    if given := os.environ.get("AGL_STORE"):
        return as_url(given)
    files = stores_in(Path())
    return f"{SQLITE}{files[0]}" if len(files) == 1 else None


def _place(url: str) -> str:
    return str(Path(url.removeprefix(SQLITE)).resolve()) if url.startswith(SQLITE) else without_password(url)


def _short(url: str) -> str:
    """Return a URL as a person types it: the path of a SQLite file, relative where it lies below this folder."""
    if not url.startswith(SQLITE):
        return url
    path, here = Path(url.removeprefix(SQLITE)).resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
