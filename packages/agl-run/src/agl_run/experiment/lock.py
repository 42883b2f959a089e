"""One trainer per experiment: a lock of the operating system on a file in the work directory.

The system gives the lock back when its holder ends, however it ends, so that nothing has to be guessed from process
ids, which a restarted container uses again. The holder's id is in the file for people to read.
"""

import errno
import os
import sys
import weakref
from pathlib import Path

from agl.errors import ConfigError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_LOCKED_BYTE = 1 << 30
"""Where Windows locks: behind the text, which it would hide otherwise."""


class ExperimentLock:
    """Held while an experiment runs; released when its process ends or is killed.

    Protects against a second trainer on this machine by mistake; it is no distributed lock. What the holder starts or
    forks does not hold it. The file stays, because a file that is removed and made again could be locked twice.
    """

    def __init__(self, workdir: Path) -> None:
        self._file = workdir / "trainer.pid"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: Another trainer holds it, in this process or another one, which is named; or the work
                directory is on a file system that has no locks.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_CREAT | os.O_RDWR)
        try:
            _lock(descriptor)
        except OSError as error:
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            raise self._refusal(error, holder) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        self._descriptor = descriptor
        self._close_in_forks()

    def release(self) -> None:
        """Give it back; idempotent."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _close_in_forks(self) -> None:
        """Let the lock end with this process: one that is forked from it would go on holding it."""
        if sys.platform == "win32":
            return
        lock = weakref.ref(self)

        def close() -> None:
            held = lock()
            if held is not None and held._descriptor is not None:
                os.close(held._descriptor)
                held._descriptor = None

        os.register_at_fork(after_in_child=close)

    def _refusal(self, error: OSError, holder: str) -> ConfigError:
        if error.errno not in _BUSY:
            return ConfigError(
                f"{self._file} cannot be locked ({error.strerror or error}), so that nothing would keep a second "
                "trainer from this experiment; set [experiment] workdir to a folder on a local disk"
            )
        who = f"process {holder}" if holder else "another process"
        return ConfigError(
            f"{who} runs this experiment already; wait for it, stop it, or use another [experiment] name"
        )


def _lock(descriptor: int) -> None:
    """Lock the file, or raise :class:`OSError` at once."""
    if sys.platform == "win32":
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
