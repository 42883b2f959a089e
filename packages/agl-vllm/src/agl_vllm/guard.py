"""Runs a program, and ends it when the process that started this guard is gone, even after ``kill -9``.

It is a script for any Python and uses only the standard library: ``python guard.py PROGRAM ARGUMENT...``. The process
that started the guard holds the other end of its standard input; when that end closes, the guard stops the program. The
program runs in a separate session, so that child processes end with it, and Ctrl-C in the terminal does not reach it.

Limit: a guard that is itself killed with ``kill -9`` leaves its program running.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType

GRACE_S = 5.0
"""Seconds between asking the program to stop and killing the program and its children."""


def main(words: list[str]) -> int:
    """Run the program; returns its exit code, or 128 plus the number of the signal that killed it."""
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        _stop(child)

    signal.signal(signal.SIGTERM, on_signal)
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    code = child.wait()
    # Kill its children (vLLM's engine processes) through the process group; they would keep the device's memory.
    _signal_group(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _watch(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):  # returns b"" at the end of the input: the process that started the guard is gone
        continue
    _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child.pid, signal.SIGTERM)
    timer = threading.Timer(GRACE_S, _signal_group, (child.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
