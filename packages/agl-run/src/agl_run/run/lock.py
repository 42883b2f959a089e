"""One trainer per experiment: an operating system lock on a file in the work directory.

The system releases the lock when its holder ends, even by a kill, so stale process ids cannot mislead: a restarted
container uses ids again. The holder's id is in a file beside it, for people to read.
"""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from agl.errors import ConfigError


class ExperimentLock:
    """A lock held while an experiment runs; released when its process ends or is killed.

    Prevents an accidental second trainer on this machine; it is no distributed lock. Child processes of the holder do
    not hold it.
    """

    def __init__(self, workdir: Path) -> None:
        self._holder = workdir / "trainer.pid"
        self._file = workdir / "trainer.lock"
        self._lock = FileLock(self._file, timeout=0, thread_local=False, fallback_to_soft=False)

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: Another trainer holds it, in this process or in another one, which the message names; or the
                work directory is on a file system without locks.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{self._who()} runs this experiment already; wait for it, stop it, or use another [experiment] name"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{self._file} cannot be locked ({error.strerror or error}), so that nothing would keep a second "
                "trainer from this experiment; set [experiment] workdir to a folder on a local disk"
            ) from error
        self._holder.write_text(str(os.getpid()), encoding="utf-8")

    def release(self) -> None:
        """Give it back; idempotent."""
        if self._lock.is_locked:
            self._holder.write_text("", encoding="utf-8")
            self._lock.release()

    def _who(self) -> str:
        holder = self._holder.read_text(encoding="utf-8", errors="replace").strip() if self._holder.exists() else ""
        return f"process {holder}" if holder else "another process"
