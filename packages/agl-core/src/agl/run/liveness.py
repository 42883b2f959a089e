"""Who a worker is, and whether it still lives: so that a restarted trainer need not wait for leases to lapse."""

import ctypes
import os
import socket
from typing import Any

from agl.ids import new_trace_id


def worker_name() -> str:
    """``host:pid:random``: says which process holds an attempt, and whether that process still lives."""
    return f"{socket.gethostname()}:{os.getpid()}:{new_trace_id()[:8]}"


def worker_is_dead(name: str) -> bool:
    """Whether a worker of this host certainly no longer runs; false when it cannot be known."""
    host, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    return host == socket.gethostname() and pid.isdigit() and not process_is_alive(int(pid))


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
