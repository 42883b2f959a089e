"""Runs a program, and ends it with all its descendants when its owner asks or has ended, even after ``kill -9``.

This is a script for POSIX systems that needs only the standard library: ``python -I -S keeper.py CONTROL OWNER GRACE
REST PROGRAM ARGUMENT...``. CONTROL is one end of a socket pair whose other end the owner holds, OWNER is the owner's
process id, and GRACE is the seconds between asking and killing. REST is ``stop`` or ``leave``, and says whether
descendants that outlive the program are stopped or left alone.

The keeper writes ``+`` to the socket when the program runs, or an error number if the program could not be started. It
writes ``.`` before it ends; an owner that misses this knows that the keeper was killed and left the program's children
behind. It stops everything when the socket closes, kills everything at once when it reads a byte, and ends with the
program's exit code or signal. On Linux it adopts descendants whose parent ended, even those in other sessions; if it
is killed its program dies too; on other systems it reaches only descendants that are still below it.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals from a terminal that the keeper ignores: they reach the program directly, and the owner reacts."""

POLL_S = 0.02
"""Seconds between two checks of descendants that are not the keeper's own children, whose end is not reported."""

LAST_S = 3.0
"""Seconds to wait for killed descendants, which may be in a system call that cannot be interrupted."""


def main(control: int, owner: int, grace_s: float, rest: str, words: list[str]) -> int:
    """Run the program; return its exit code, or minus the number of the signal that killed it."""
    # The program must not hold the socket, whose end means that the owner is gone.
    os.set_inheritable(control, False)
    wake = _wake_up()
    # Orphans below become children of this process, even from sessions of their own, so that they
    # can be found and ended.
    _prctl(PR_SET_CHILD_SUBREAPER)
    # Ctrl-C reaches the whole foreground group; the keeper has to outlive the program.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    pid, error = _start(words, before)
    _tell(control, str(error).encode() if error else b"+")
    if error:
        return 127
    _drop_pipes()
    is_stopped = False
    while (code := _reap(pid)) is None and not is_stopped:
        grace_s, is_stopped = _wait(control, owner, wake, grace_s)
    # Servers that a program starts on purpose are left alone with ``leave``.
    if is_stopped or rest == "stop":
        ended = _end_descendants(grace_s, pid)
        code = ended if code is None else code
    # The owner takes a socket that closes without this for a keeper that was killed.
    _tell(control, b".")
    return 0 if code is None else code


def _wake_up() -> int:
    """Return the end of a pipe that becomes readable when a child ends or SIGTERM arrives."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # A byte per signal makes select return; a full pipe is awake already.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _ignore)
    return reading


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the signal only has to wake this process."""


def _prctl(option: int, value: int = 1) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(words: list[str], before: Mapping[signal.Signals, object]) -> tuple[int, int]:
    """Start the program; return its process id and 0, or its process id and the error number if it cannot start."""
    reading, writing = os.pipe()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(words, before, keeper, writing)
    os.close(writing)
    # The pipe closes by itself when exec succeeds, because it is not inherited.
    error = os.read(reading, 16)
    os.close(reading)
    if error:
        os.waitpid(pid, 0)
    return pid, int(error or 0)


def _become(words: list[str], before: Mapping[signal.Signals, object], keeper: int, writing: int) -> None:
    """Replace this process by the program; never returns."""
    try:
        # The system itself kills the program if the keeper is killed.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The keeper may have died between the fork and the line above.
        if os.getppid() != keeper:
            os._exit(127)
        # The program starts with signals as if nothing stood between it and its owner.
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(writing, str(error.errno).encode())
    finally:
        os._exit(127)


def _tell(control: int, answer: bytes) -> None:
    with suppress(OSError):  # the owner may be gone
        os.write(control, answer)


def _drop_pipes() -> None:
    """Close the program's standard streams in the keeper, so that only the program holds them open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _wait(control: int, owner: int, wake: int, grace_s: float) -> tuple[float, bool]:
    """Wait for a signal or the owner; return the current grace period, and true if everything must stop."""
    # An owner that was killed leaves its children to another parent.
    if os.getppid() != owner:
        return grace_s, True
    # The owner's forked children may hold the socket open, so its end is also looked for.
    ready, _, _ = select.select([control, wake], [], [], 1.0)
    if control in ready:
        return (0.0 if _read(control) else grace_s), True
    return grace_s, wake in ready and signal.SIGTERM in _read(wake)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 4096)
    except OSError:
        return b""


def _reap(pid: int) -> int | None:
    """Collect ended children; return the program's exit code if the program is among them, else ``None``."""
    code: int | None = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _end_descendants(grace_s: float, pid: int) -> int | None:
    """Ask every descendant to stop, and kill the rest after the grace period.

    Returns the program's exit code if the program ended meanwhile, else ``None``.
    """
    code: int | None = None
    now = time.monotonic()
    kill_at, give_up_at = now + grace_s, now + grace_s + LAST_S
    asked: set[int] = set()
    while (left := descendants(os.getpid())) and time.monotonic() < give_up_at:
        is_killing = time.monotonic() >= kill_at
        # Asked once, killed again and again: new descendants appear while old ones end.
        for one in left if is_killing else left - asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL if is_killing else signal.SIGTERM)
        asked |= left
        time.sleep(POLL_S)
        ended = _reap(pid)
        code = ended if code is None else code
    return code


def descendants(root: int) -> set[int]:
    """Return the ids of all processes below ``root``, including zombies."""
    parents = _parents()
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _parents() -> dict[int, int]:
    # macOS has no /proc.
    if not os.path.exists("/proc/self/stat"):
        import subprocess

        rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.split("\n")
        return {int(pid): int(parent) for pid, parent in (row.split() for row in rows if row.strip())}
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of a program stands in parentheses and may hold some itself.
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return parents


def _end_like(code: int) -> None:
    """End with the program's exit code, or by the signal that killed it; never returns."""
    if code < 0:
        # The program has written its core; a second one of the keeper would only confuse.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # the handlers of two signals cannot be changed
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        # Signals that were blocked when this process started would otherwise stay pending.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _end_like(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:]))
