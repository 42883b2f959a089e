"""Reads from Linux's ``/proc`` how many processes a process has started, and how much memory they use."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_KILOBYTE = 1024


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources that the descendants of a process use.

    Attributes:
        processes: Process ids of the descendants.
        memory: Bytes of resident memory; memory that several processes share counts once for each.
    """

    processes: tuple[int, ...]
    memory: int


def usage_below(root: int) -> Usage:
    """Return the resource use of all descendants of the process ``root``, without that of ``root`` itself."""
    rows = _rows()
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, (parent, _) in rows.items() if parent in new} - found
        found |= new
    return Usage(processes=tuple(sorted(found)), memory=sum(rows[pid][1] for pid in found))


def exact_memory(processes: tuple[int, ...]) -> int:
    """Return the bytes of memory in use, counting shared memory once; slower than :func:`usage_below`."""
    total = 0
    for pid in processes:
        with suppress(OSError, ValueError):
            lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * _KILOBYTE
    return total


def file_memory(processes: Sequence[int], folders: Sequence[Path]) -> int:
    """Return the bytes of the files in a sandbox's private in-memory folders.

    Args:
        processes: Processes in the sandbox, through one of which the folders are found.
        folders: The folders; one that is not private to the sandbox does not count.
    """
    found: dict[int, int] = {}
    for pid in processes:
        for folder in folders:
            own = f"{_PROC}/{pid}/root{folder}"
            with suppress(OSError):
                device = os.stat(own).st_dev
                if device != folder.stat().st_dev:
                    size = os.statvfs(own)
                    found[device] = (size.f_blocks - size.f_bfree) * size.f_frsize
        if found:
            break
    return sum(found.values())


def _rows() -> dict[int, tuple[int, int]]:
    """Return the parent id and the resident bytes of every process, by process id."""
    page = os.sysconf("SC_PAGE_SIZE")
    rows: dict[int, tuple[int, int]] = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()
                rows[int(name)] = int(fields[1]), int(fields[21]) * page
    return rows
