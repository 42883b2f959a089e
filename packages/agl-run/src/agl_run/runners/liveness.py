"""Who a worker is, and whether it still lives: so that a restarted trainer need not wait for leases to lapse."""

import ctypes
import hashlib
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from agl.schemas import new_trace_id

_MULTICAST = 1 << 40
"""Bit of a hardware address that says it is made up, where the machine has none."""


def worker_name() -> str:
    """``host@place:pid:random``: says which process holds an attempt, and whether that process still lives."""
    return f"{socket.gethostname()}@{place()}:{os.getpid()}:{new_trace_id()[:8]}"


def place() -> str:
    """A digest of where this process runs: processes of one place see each other's ids and loopback addresses.

    Machines and containers may have equal host names. On Linux the boot and the namespaces of the process tell them
    apart, elsewhere the hardware address.
    """
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        facts.extend(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    if len(facts) == 1 and not (address := uuid.getnode()) & _MULTICAST:
        facts.append(f"{address:x}")
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()


def worker_is_dead(name: str) -> bool:
    """Whether a worker of this place certainly no longer runs; false when it cannot be known."""
    where, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    return where == f"{socket.gethostname()}@{place()}" and pid.isdigit() and not process_is_alive(int(pid))


def process_is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this machine; portable."""
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
