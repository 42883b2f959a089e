"""Memory and CPU of an experiment's processes, as the kernel counts them; Linux only."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")
_ACTOR = b"ray::WorkerActor"


@dataclass(kw_only=True)
class Use:
    """The largest sums that were seen.

    Attributes:
        ours_mb: PSS of ``agl run`` and of all workers.
        run_mb: PSS of ``agl run`` alone.
        ray_mb: PSS of Ray's own processes, workers that wait included.
        run_cpu_s: CPU seconds of ``agl run``, from its start.
        worker_cpu_s: CPU seconds of all workers, from their starts.
    """

    ours_mb: float = 0.0
    run_mb: float = 0.0
    ray_mb: float = 0.0
    run_cpu_s: float = 0.0
    worker_cpu_s: float = 0.0


def watched(run: "subprocess.Popen[str]", ours: Sequence[int]) -> Use:
    """Look each second until a process ends; ``ours`` are the processes that belong to agl, besides Ray's actors."""
    use = Use()
    while run.poll() is None:
        _look(use, run.pid, set(ours))
        time.sleep(LOOK_S)
    return use


def _look(use: Use, run: int, ours: set[int]) -> None:
    workers_mb = ray_mb = run_mb = worker_cpu_s = 0.0
    for pid in ours | set(_descendants(ours)):
        try:
            name, pss_mb, cpu_s = Path(f"/proc/{pid}/cmdline").read_bytes(), _pss_mb(pid), _cpu_s(pid)
        except OSError:
            continue  # it has ended
        if pid == run:
            run_mb, use.run_cpu_s = pss_mb, cpu_s
        elif pid in ours or name.startswith(_ACTOR):
            workers_mb, worker_cpu_s = workers_mb + pss_mb, worker_cpu_s + cpu_s
        else:
            ray_mb += pss_mb
    use.ours_mb, use.run_mb = max(use.ours_mb, workers_mb + run_mb), max(use.run_mb, run_mb)
    use.ray_mb, use.worker_cpu_s = max(use.ray_mb, ray_mb), max(use.worker_cpu_s, worker_cpu_s)


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
