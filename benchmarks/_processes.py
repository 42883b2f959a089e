"""Memory and CPU of an experiment's processes, as the kernel counts them; Linux only."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOOK_S = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")
_ACTOR = b"ray::WorkerActor"


class Look(NamedTuple):
    """Holds the memory and processor time of a group of processes at one moment.

    Attributes:
        at: Unix seconds.
        run_mb: PSS of ``agl run``, with its gateway where that is a process of its own.
        workers_mb: PSS of all workers.
        ray_mb: PSS of Ray's own processes, those that wait for work included.
        run_cpu_s: CPU seconds of these since their starts.
        workers_cpu_s: CPU seconds of all workers since their starts.
    """

    at: float
    run_mb: float
    workers_mb: float
    ray_mb: float
    run_cpu_s: float
    workers_cpu_s: float


def watched(run: subprocess.Popen[str], ours: Sequence[int]) -> list[Look]:
    """Look each second until a process ends; ``ours`` are the processes that belong to agl, besides Ray's actors."""
    looks: list[Look] = []
    while run.poll() is None:
        looks.append(_look(run.pid, set(ours)))
        time.sleep(LOOK_S)
    return looks


def tree_cpu_s(root: int) -> float:
    """Return the CPU seconds of a process and its descendants, those that it has waited for included."""
    total = 0.0
    for pid in {root, *_descendants({root})}:
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS
    return total


def _look(run: int, ours: set[int]) -> Look:
    sums = {"run": (0.0, 0.0), "workers": (0.0, 0.0), "ray": (0.0, 0.0)}
    for pid in ours | set(_descendants(ours)):
        try:
            name, pss_mb, cpu_s = Path(f"/proc/{pid}/cmdline").read_bytes(), _pss_mb(pid), _cpu_s(pid)
        except OSError:
            continue  # it has ended
        whose = _owner(pid, name, run=run, ours=ours)
        memory_mb, used_s = sums[whose]
        sums[whose] = (memory_mb + pss_mb, used_s + cpu_s)
    return Look(
        at=time.time(),
        run_mb=sums["run"][0],
        workers_mb=sums["workers"][0],
        ray_mb=sums["ray"][0],
        run_cpu_s=sums["run"][1],
        workers_cpu_s=sums["workers"][1],
    )


def _owner(pid: int, name: bytes, *, run: int, ours: set[int]) -> str:
    if pid == run or b"agl_gateway" in name:
        return "run"
    return "workers" if pid in ours or name.startswith(_ACTOR) else "ray"


def _descendants(roots: set[int]) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    waiting = list(roots)
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
