"""Temporary folders that are removed even if their process is killed: a later process on the machine does it.

The owner holds an operating system lock on a file next to its folder, and the system releases the lock when the owner
ends. So a folder whose lock can be taken has no owner any more. Process ids could not show this: they are reused, and
containers that share ``/tmp`` can have equal ones.
"""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "agl-run-"
_LOCK = ".lock"


@contextmanager
def own_folder() -> Generator[Path]:
    """Make a temporary folder, and remove it at the end; after a kill, :func:`remove_abandoned` removes it."""
    path, lock = _make()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        # Removed while the lock is held: afterwards another process may have locked a new file of
        # that name.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _make() -> tuple[Path, FileLock]:
    """Create and lock a folder; try again if another process removed the folder before it was locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        file = path.with_name(path.name + _LOCK)
        lock = _lock_of(file)
        with suppress(Timeout):
            lock.acquire()
            # Between mkdtemp and the lock another process may have found the folder without an
            # owner and removed it.
            if file.exists() and path.exists():
                return path, lock
            lock.release()


def remove_abandoned() -> None:
    """Remove this user's temporary folders whose owners have ended."""
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_LOCK}"):
        with suppress(OSError, Timeout):  # another user's, or in use, or gone meanwhile
            # ``lstat``: a link that another user put there must not lead to a file of ours.
            if hasattr(os, "getuid") and file.lstat().st_uid != os.getuid():
                continue
            # Only a lock that can be taken proves that the owner has ended.
            with _lock_of(file):
                shutil.rmtree(file.with_name(file.name.removesuffix(_LOCK)), ignore_errors=True)
                file.unlink(missing_ok=True)


def _lock_of(file: Path) -> FileLock:
    return FileLock(file, timeout=0, thread_local=False, fallback_to_soft=False)
