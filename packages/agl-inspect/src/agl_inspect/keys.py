"""Reads keys from a file, one per line, and reads the file again when it changes, so that no restart is needed.

The key on the first line signs or is sent; the keys on all lines are accepted. So a key is rotated in steps that refuse
nobody: add the new key, move it to the first line, and remove the old key when nothing uses it any more.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from agl.errors import ConfigError

_LOG = logging.getLogger(__name__)

LEAST = 16
"""The least length of a key in bytes."""

_LIMIT = 64 * 1024
"""The largest size of a key file in bytes; a larger file was probably named by mistake."""

Keys = Callable[[], bytes]
"""A function that returns the current keys, one per line: the first one signs or is sent, all are accepted."""


class KeyFile:
    """The keys of a file. Calling the object returns the keys, and reads the file again if it has changed.

    If a changed file cannot be read or is not valid, a warning is logged, and the previous keys stay in use.

    Args:
        path: The file. A symbolic link is followed at every call, because Kubernetes updates a mounted secret that way.
        purpose: The use of the keys, for messages, such as ``signing key``.
        is_own: True if only this user may read the file; false if the user's group may read it too, as mounted secrets
            require.

    Raises:
        ConfigError: Other users can read the file, it is too large, it holds no key, or a key has fewer than 16 bytes.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, *, purpose: str, is_own: bool = False) -> None:
        self.path = path
        self._purpose = purpose
        self._private = 0o077 if is_own else 0o007
        self._seen = self._state()
        self._keys = self._read()

    def __repr__(self) -> str:
        return f"KeyFile({str(self.path)!r})"

    def __call__(self) -> bytes:
        """Return the current keys, one per line."""
        state: object = None
        try:
            state = self._state()
            if state != self._seen:
                self._keys = self._read()
                _LOG.info("%s was read again", self._shown())
        except (OSError, ConfigError) as error:
            if state != self._seen:
                _LOG.warning("the keys that %s held before stay in use: %s", self._shown(), error)
        self._seen = state
        return self._keys

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            if sys.platform != "win32" and os.fstat(file.fileno()).st_mode & self._private:
                raise ConfigError(f"{self._shown()} can be read by other users. Run: chmod 600 {self.path}")
            return joined_keys(file.read(_LIMIT + 1), source=self._shown())

    def _shown(self) -> str:
        return f"the {self._purpose} {self.path}"

    def _state(self) -> object:
        found = os.stat(self.path)
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def joined_keys(content: bytes, *, source: str) -> bytes:
    """Return the keys in a file's content, one per line, without repetitions and surrounding spaces.

    Raises:
        ConfigError: The content is too large, it has no key, or a key is too short; the message never shows a key.
    """
    lines = [line.strip() for line in content.splitlines()]
    if len(content) > _LIMIT:
        raise ConfigError(f"{source} is larger than {_LIMIT} bytes; it holds one key a line, and nothing else")
    short = next((number for number, line in enumerate(lines, 1) if 0 < len(line) < LEAST), 0)
    keys = tuple(dict.fromkeys(filter(None, lines)))
    if short or not keys:
        where = f"{source}, line {short}," if len(keys) > 1 else source
        raise ConfigError(
            f"{where} has {len(lines[short - 1]) if short else 0} bytes, at least {LEAST} are needed. "
            'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return b"\n".join(keys)


def state_dir() -> Path:
    """Return the folder of this user's state: ``agl`` below the platform's usual folder."""
    from platformdirs import user_state_path  # here, because most commands need no folder of the user

    return user_state_path("agl", appauthor=False)
