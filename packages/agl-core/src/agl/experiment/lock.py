"""One trainer per experiment: a file with the owner's process id in the work directory."""

import os
from contextlib import suppress
from pathlib import Path

from agl.errors import ConfigError
from agl.run.liveness import process_is_alive


class ExperimentLock:
    """Held while an experiment runs; a file that a dead process left behind is taken over.

    Protects against a second trainer on this machine by mistake; it is no distributed lock.
    """

    def __init__(self, workdir: Path) -> None:
        self._file = workdir / "trainer.pid"

    def acquire(self) -> None:
        """Take the lock; raises :class:`ConfigError` naming the process that holds it."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                descriptor = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                self._take_over()
                continue
            with os.fdopen(descriptor, "w") as file:
                file.write(str(os.getpid()))
            return
        raise ConfigError(f"cannot take {self._file}; another process is starting the same experiment")

    def _take_over(self) -> None:
        text = ""
        with suppress(OSError):
            text = self._file.read_text().strip()
        if text.isdigit() and process_is_alive(int(text)):
            raise ConfigError(
                f"process {text} runs this experiment already; wait for it, stop it, or use another [experiment] name. "
                f"If that process is something else, remove {self._file}"
            )
        with suppress(FileNotFoundError):
            self._file.unlink()

    def release(self) -> None:
        """Give it back; idempotent."""
        with suppress(FileNotFoundError):
            self._file.unlink()
