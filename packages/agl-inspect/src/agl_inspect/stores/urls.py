"""Checks the URL of an experiment's store before the store is opened, and finds the stores of a folder."""

import re
from pathlib import Path

from agl.errors import ConfigError, StoreError
from agl.stores import shown_url

SQLITE = "sqlite:///"


def check_store_url(url: str, folder: Path) -> None:
    """Check a store's URL.

    Args:
        url: As in the experiment.
        folder: Base of relative paths.

    Raises:
        ConfigError: It is a path, a malformed URL of a SQLite file, one with options, or one of a directory.
    """
    if "://" not in url or (url.startswith("sqlite:") and not url.startswith(SQLITE)) or url == SQLITE:
        path = url.removeprefix("sqlite:").lstrip("/") or "runs/agl.db"
        meant = "memory://" if path == "memory" else f"{SQLITE}{path}"
        raise ConfigError(f"experiment.store is {url!r}, which is no URL of a store; write {meant}")
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
    """Return what a command line gives as a store, a URL or the path of a SQLite file, as a URL."""
    return text if "://" in text else f"{SQLITE}{text}"


def stores_in(folder: Path) -> list[Path]:
    """Return the SQLite files that commands look for in a folder: those in its ``runs/``."""
    return sorted((folder / "runs").glob("*.db"))


def located(url: str, folder: Path) -> str:
    """Return the URL with a relative SQLite path taken from ``folder``."""
    if not url.startswith(SQLITE) or url.startswith(f"{SQLITE}/"):
        return url
    return f"{SQLITE}{(folder / url.removeprefix(SQLITE)).absolute()}"


def without_password(url: str) -> str:
    """Return the URL without passwords and tokens, still with the user of a database."""
    user = re.match(r"postgres\w*://([\w.-]+)(:[^@/]*)?@", url)
    shown = re.sub(r"(?<=[?&])password=[*]{3}&?", "", shown_url(url)).rstrip("?&")
    return shown.replace("://", f"://{user[1]}@", 1) if user else shown
