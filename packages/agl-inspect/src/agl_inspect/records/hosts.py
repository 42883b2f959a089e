"""Names workers and detects dead ones, so that a restarted trainer does not wait for leases to lapse."""

import ctypes
import hashlib
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from agl.schemas import new_trace_id

OWNER = ""
"""The member name of the process that runs the experiment; remote workers use their own names."""

_MULTICAST = 1 << 40
"""Bit that marks a random hardware address, on a machine without one."""


def worker_name() -> str:
    """Return ``host@place:pid:random``, which identifies the process that holds an attempt."""
    return f"{socket.gethostname()}@{place()}:{os.getpid()}:{new_trace_id()[:8]}"


def process_of(name: str) -> str:
    """Return the part of a worker's name that all names of its process have in common."""
    return name.rpartition(":")[0]


def place() -> str:
    """Return a digest of the machine and container: processes with equal ones share process ids and loopback addresses.

    Machines and containers may have equal host names. On Linux the boot id and the namespaces of the process tell them
    apart, on other systems the hardware address.
    """
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        facts.extend(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    if len(facts) == 1 and not (address := uuid.getnode()) & _MULTICAST:
        facts.append(f"{address:x}")
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()


def worker_is_dead(name: str) -> bool:
    """Return true if a worker of this place has certainly ended, false if unknown."""
    where, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    return where == f"{socket.gethostname()}@{place()}" and pid.isdigit() and not process_is_alive(int(pid))


def process_is_alive(pid: int) -> bool:
    """Return true if a process with this id exists on this machine; portable."""
    if pid == os.getpid():
        return True
    if os.name == "nt":
        return _is_alive_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_alive_windows(pid: int) -> bool:
    kernel32: Any = getattr(ctypes, "windll").kernel32  # noqa: B009  # absent on other systems
    handle = kernel32.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    if not handle:
        return False
    code = ctypes.c_ulong()
    kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel32.CloseHandle(handle)
    return code.value == 259  # STILL_ACTIVE
