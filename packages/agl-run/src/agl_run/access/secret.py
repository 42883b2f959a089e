"""The key that signs attempt tokens: from the environment, or from a file that only its user can read.

A file may hold several keys, which can be rotated without a restart; see :mod:`agl_inspect.keys`.
"""

import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from agl.errors import ConfigError
from agl_inspect.keys import KeyFile, Keys, joined_keys, state_dir

SECRET_ENV = "AGL_SECRET"
"""The environment variable that holds the signing key."""

SECRET_FILE_ENV = "AGL_SECRET_FILE"
"""The environment variable that names a file with signing keys, one per line."""

_PURPOSE = "signing key"


def load_secret(path: Path | None = None) -> bytes:
    """Return the key that signs new tokens: the first key of :func:`signing_keys`.

    Args:
        path: The file of keys, used if no environment variable names the keys; by default ``secret`` in
            :func:`state_dir`.

    Raises:
        ConfigError: A key is too short, others can read ``path``, the file cannot be read or created, or both
            environment variables are set.
    """
    return signing_keys(path)().splitlines()[0]


def signing_keys(path: Path | None = None) -> Keys:
    """Return the signing keys for :class:`~agl_run.access.AttemptTokens`.

    The keys come from ``AGL_SECRET`` if it is set, else from the file that ``AGL_SECRET_FILE`` names, else from
    ``path``, which is created on first use with mode 0600. A file is read again when it changes.

    Args:
        path: The file of keys; by default ``secret`` in :func:`state_dir`.

    Raises:
        ConfigError: A key is too short, others can read ``path``, the file cannot be read or created, or both
            variables are set.
    """
    remedy = "write a key of 32 random characters into it"
    if given := environment_keys(SECRET_ENV, SECRET_FILE_ENV, purpose=_PURPOSE, remedy=remedy):
        return given
    path = path or state_dir() / "secret"
    try:
        if not path.exists():
            _create(path)
        # Our own file must not be readable by others; a file that a person names may come from a
        # secret store, which sets other modes.
        return KeyFile(path, purpose=_PURPOSE, is_own=True)
    except OSError as error:
        raise ConfigError(
            f"the signing key {path} cannot be read or made ({error}). "
            f"Set {SECRET_ENV} to 32 random characters, or make the folder writable."
        ) from error


def is_secret_given() -> bool:
    """Return true if the environment holds the signing key or names its file."""
    return SECRET_ENV in os.environ or bool(os.environ.get(SECRET_FILE_ENV))


def _create(path: Path) -> None:
    """Create the key file under a temporary name and then move it, so that no process ever reads half a key."""
    # The folder's mode protects the file even before its own is set.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    # The mode is set at creation: between a write and a later chmod others could read the key.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        _publish(draft, path)
    finally:
        # After a hard link the draft is a second name of the key.
        draft.unlink(missing_ok=True)


def _publish(draft: Path, path: Path) -> None:
    """Move the draft to ``path``, unless another process has created ``path`` first."""
    place = os.rename if sys.platform == "win32" else os.link
    with suppress(FileExistsError):
        place(draft, path)


def environment_keys(variable: str, file_variable: str, *, purpose: str, remedy: str) -> Keys | None:
    """Return the keys from a variable, or from the file that another variable names; ``None`` if neither is set.

    Args:
        variable: The variable that holds the keys; its value is read once.
        file_variable: The variable that names the file, which is read again when it changes.
        purpose: A name for the keys in messages.
        remedy: Advice for messages: what to write into a file that cannot be read.

    Raises:
        ConfigError: Both variables are set, a key is too short, or the file cannot be read.
    """
    given, named = os.environ.get(variable), os.environ.get(file_variable)
    # Two sources would rotate apart, and tokens would fail on some machines only.
    if given is not None and named:
        raise ConfigError(
            f"{variable} and {file_variable} are both set; unset one of them: the first holds the {purpose} and stays "
            "as it is, the second names a file that is read again when it changes"
        )
    if given is not None:
        keys = joined_keys(given.encode(), source=f"the environment variable {variable}")
        # The environment of a running process never changes, so there is nothing to read again.
        return lambda: keys
    try:
        return KeyFile(Path(named), purpose=purpose) if named else None
    except OSError as error:
        raise ConfigError(
            f"the {purpose} in {named}, which {file_variable} names, cannot be read ({error}); {remedy}, or correct "
            "the variable"
        ) from error
