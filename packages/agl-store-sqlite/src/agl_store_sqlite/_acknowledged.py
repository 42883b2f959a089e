"""Detects, when a store is opened, that SQLite dropped acknowledged changes, by a record next to the file.

If SQLite's write-ahead log is damaged, SQLite drops everything after the first damaged part without an error; if the
log is missing, it drops all of it. The record is the newest cursor of the change feed whose commit was acknowledged. It
is written after every commit and never synced, so after a power cut it may lag behind the store, but is never ahead of
it.
"""

import logging
import os
import sqlite3
from pathlib import Path

from agl.errors import StoreError

_LOG = logging.getLogger("agl_store_sqlite")

_ONLY_FILE = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"))
"""Flags that refuse a link, which would lead to a file of somebody else, and do not wait for the writer of a pipe."""


class AcknowledgedCursor:
    """Records the newest acknowledged cursor of one store file; used by one thread at a time.

    Create it before the store's file is opened.

    Args:
        path: The store's file. The record's file has the same name with the suffix ``-acknowledged``.
    """

    def __init__(self, path: Path) -> None:
        self._store = path.absolute()  # this process may change its folder
        self._path = path.with_name(f"{path.name}-acknowledged")
        self._file: int | None = None
        self._has_warned = False
        # Read before the store: other processes may go on to write both.
        self._is_new = not path.exists()
        self._read = 0 if self._is_new else self._load()

    def _load(self) -> int:
        try:
            with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | _ONLY_FILE)) as file:
                return int(file.read(32))
        except (OSError, ValueError):
            return 0

    def compare(self, connection: sqlite3.Connection) -> None:
        """Log a warning if the store's newest cursor is below the recorded one; open the record's file for writing."""
        found = last_cursor(connection)
        if found < self._read:
            _LOG.warning(
                "the store %s lost changes that it had acknowledged: up to %d are missing, those after cursor %d up to "
                "%d. SQLite drops what stands behind a damaged part of %s-wal, and all of it if that file is missing "
                "or of another time. Check the disk, and put both files back together from a copy if there is one; "
                "otherwise continue the experiments with --resume, which runs again what is missing",
                self._store,
                self._read - found,
                found,
                self._read,
                self._store.name,
            )
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | _ONLY_FILE, 0o666)
            if self._is_new:
                self.note(0)  # the record may be of a store that was removed
        except OSError as error:
            self._warn(error)

    def require_store(self) -> None:
        """Raise :class:`StoreError` if the store's file was removed; SQLite would go on to write into nothing."""
        if self._file is not None and not os.path.exists(self._store):
            raise StoreError(
                f"the store {self._store} was removed while this process used it, and nothing more is recorded: stop "
                "this process and start it again"
            )

    def note(self, cursor: int) -> None:
        """Record a cursor after its commit; logs a warning the first time that the record cannot be written."""
        if self._file is None:
            return
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, b"%020d" % cursor)
        except OSError as error:  # the commit stands, and its caller has to learn of it
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "lost changes of the store %s would go unnoticed: %s cannot be written: %s",
                self._store,
                self._path,
                error.strerror or error,
            )

    def close(self) -> None:
        """Close the record's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def last_cursor(connection: sqlite3.Connection) -> int:
    """Return the newest cursor of the change feed, 0 in an empty store."""
    return connection.execute("SELECT coalesce(max(cursor), 0) FROM changes").fetchone()[0]
