"""Opens stores by their URLs, and renders the commands that messages propose for them.

- Before a store is opened, its URL is checked. Without a URL, the SQLite files of a folder are listed.
- A proposed command works when it is pasted into the same shell. It names the store, unless the command would find the
  store anyway, in ``AGL_STORE`` or as the only one in ``runs/``. Passwords are left out: PostgreSQL reads them from
  ``PGPASSWORD`` or a password file, and a served store reads its token from ``AGL_TOKEN``.
"""

import os
import re
import shlex
from pathlib import Path

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError, StoreError
from agl.urls import shown_url

SQLITE = "sqlite:///"


def check_store_url(url: str, folder: Path) -> None:
    """Check a store's URL.

    Args:
        url: The experiment's setting ``store``.
        folder: Base of relative paths.

    Raises:
        ConfigError: The text is a path and not a URL, or a SQLite URL that is malformed, has options or names a
            directory.
    """
    if "://" not in url or (url.startswith("sqlite:") and not url.startswith(SQLITE)) or url == SQLITE:
        path = url.removeprefix("sqlite:").lstrip("/") or "runs/agl.db"
        meant = "memory://" if path == "memory" else f"{SQLITE}{path}"
        raise ConfigError(f"experiment.store is {url!r}, which is not the URL of a store; write {meant}")
    if url.startswith(SQLITE):
        from agl_store_sqlite import path_of

        try:
            path_of(url)
        except StoreError as error:
            raise ConfigError(f"experiment.store is {url!r}: {error}") from error
    refuse_directory(url, folder)


def refuse_directory(url: str, folder: Path) -> None:
    """Raise :class:`ConfigError` for the URL of a SQLite store whose path is a directory."""
    name = url.removeprefix(SQLITE)
    if url.startswith(SQLITE) and (folder / name).is_dir():
        files = sorted(path.name for path in (folder / name).glob("*.db"))
        inside = f"{SQLITE}{name.rstrip('/')}/{files[0] if files else 'agl.db'}"
        raise ConfigError(f"the store {name!r} is a directory; name a file in it, such as {inside}")


def as_url(text: str) -> str:
    """Return the URL of a store that a command line names by a URL or by the path of a SQLite file."""
    return text if "://" in text else f"{SQLITE}{text}"


def stores_in(folder: Path) -> list[Path]:
    """Return the files ``runs/*.db`` in a folder, where commands look for a store."""
    return sorted((folder / "runs").glob("*.db"))


def located(url: str, folder: Path) -> str:
    """Return the URL with a relative SQLite path joined to ``folder``; other URLs are returned unchanged."""
    if not url.startswith(SQLITE) or url.startswith(f"{SQLITE}/"):
        return url
    return f"{SQLITE}{(folder / url.removeprefix(SQLITE)).absolute()}"


def without_password(url: str) -> str:
    """Return the URL without passwords and tokens; the user name of a PostgreSQL URL stays."""
    user = re.match(r"postgres\w*://([\w.-]+)(:[^@/]*)?@", url)
    shown = re.sub(r"(?<=[?&])password=[*]{3}&?", "", shown_url(url)).rstrip("?&")
    return shown.replace("://", f"://{user[1]}@", 1) if user else shown


def build_store(manager: PluginManager, url: str) -> Store:
    """Open the store at a URL.

    Raises:
        ConfigError: No plugin has a store for the URL's scheme, or the store cannot use the URL.
        PluginError: The store lacks a part of the contract.
    """
    return manager.build(manager.store_entry(url.partition("://")[0]), url=url)


MEMORY = "memory:"


def command(*words: str, store_url: str = "") -> str:
    """Return ``agl WORDS``, quoted for a shell; ``--store`` is added if the command would not find the store."""
    return shlex.join(("agl", *words, *_store_option(store_url)))


def proposal(lead: str, *words: str, store_url: str) -> str:
    """Return ``" LEAD: agl WORDS"`` to append to a message; ``""`` for a store in memory, which no command can open."""
    return "" if store_url.startswith(MEMORY) else f" {lead}: {command(*words, store_url=store_url)}"


def address_of(store: Store) -> str:
    """Return a store's URL without passwords; ``""`` if the store does not know it."""
    from agl.stores import TableStore  # here, because commands that open no store do not need it

    return store.backend.shown_url if isinstance(store, TableStore) else ""


def _store_option(url: str) -> tuple[str, ...]:
    found = _found_without_option()
    if not url or url.startswith(MEMORY) or (found is not None and _place(found) == _place(url)):
        return ()
    return ("--store", _short(without_password(url)))


def _found_without_option() -> str | None:
    """Return the URL of the store that commands in this folder find without ``--store``; ``None`` if they find none."""
    if given := os.environ.get("AGL_STORE"):
        return as_url(given)
    files = stores_in(Path())
    return f"{SQLITE}{files[0]}" if len(files) == 1 else None


def _place(url: str) -> str:
    return str(Path(url.removeprefix(SQLITE)).resolve()) if url.startswith(SQLITE) else without_password(url)


def _short(url: str) -> str:
    """Return the path of a SQLite URL, relative if it lies below the working folder; other URLs are unchanged."""
    if not url.startswith(SQLITE):
        return url
    path, here = Path(url.removeprefix(SQLITE)).resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
