"""The key that signs attempt tokens, from the environment or else from a file that only its user can read."""

import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path

from agl.errors import ConfigError
from agl_run.tokens import check_secret

SECRET_ENV = "AGL_SECRET"
"""The environment variable that holds the signing key."""


def load_secret(path: Path | None = None) -> bytes:
    """The signing key: ``AGL_SECRET`` if set, else the content of ``path``, made on first use with mode 0600.

    Args:
        path: By default ``secret`` in :func:`state_dir`, or in the place of an earlier release.

    Raises:
        ConfigError: It is too short, others can read the file, or the file cannot be made.
    """
    given = os.environ.get(SECRET_ENV)
    if given is not None:
        return check_secret(given.encode(), source=f"the environment variable {SECRET_ENV}")
    path = path or _usual_path()
    try:
        if not path.exists():
            _create(path)
        return _read(path)
    except OSError as error:
        raise ConfigError(
            f"the signing key {path} cannot be read or made ({error}). "
            f"Set {SECRET_ENV} to 32 random characters, or make the folder writable."
        ) from error


def state_dir() -> Path:
    """The folder of this user's state: ``agl`` below the platform's usual folder."""
    return user_state_path("agl", appauthor=False)


def _usual_path() -> Path:
    """The key's path; an existing key of an earlier release on macOS, which ignored ``XDG_STATE_HOME``, comes first."""
    places = (Path.home() / "Library" / "Application Support" / "agl", state_dir())
    return next((place / "secret" for place in places if (place / "secret").exists()), places[-1] / "secret")


def _create(path: Path) -> None:
    """Create the key; the file is written under another name first, so that no process ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        _publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _publish(draft: Path, path: Path) -> None:
    """Move the draft into place unless another process was first: both calls refuse a target that exists."""
    place = os.rename if sys.platform == "win32" else os.link
    with suppress(FileExistsError):
        place(draft, path)


def _read(path: Path) -> bytes:
    if sys.platform != "win32" and path.stat().st_mode & 0o077:
        raise ConfigError(f"the signing key {path} can be read by other users. Run: chmod 600 {path}")
    return check_secret(path.read_bytes().strip(), source=f"the signing key {path}")
