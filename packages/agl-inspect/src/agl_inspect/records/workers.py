"""Names the processes that run experiments, lists those that take part in one, and detects dead ones.

A restarted trainer need not wait for the leases of a dead process to lapse.
"""

import hashlib
import os
import socket
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

from agl.contracts import ExperimentRecord, Presence, RolloutQuery, Store
from agl.schemas import Record, new_trace_id
from agl.stores import read_recordings

OWNER = ""
"""The member name of the process that runs the experiment; remote workers use their own names."""

_MULTICAST = 1 << 40
"""Bit that marks a random hardware address, on a machine without one."""


def worker_name() -> str:
    """Return ``host@host_id:pid:random``, which identifies the process that holds an attempt."""
    return f"{socket.gethostname()}@{host_id()}:{os.getpid()}:{new_trace_id()[:8]}"


def process_of(name: str) -> str:
    """Return the part of a worker's name that all names of its process have in common."""
    return name.rpartition(":")[0]


def host_id() -> str:
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
    """Return true if a worker of this machine and container has certainly ended, false if unknown."""
    where, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    return where == f"{socket.gethostname()}@{host_id()}" and pid.isdigit() and not process_is_alive(int(pid))


def process_is_alive(pid: int) -> bool:
    """Return true if a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


GONE_S = 15.0
"""Seconds without a sign of life after which a process counts as gone; they come every four."""


class ListedWorker(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A process that takes part in an experiment.

    Attributes:
        worker: Its name, ``host@host_id:pid:random``.
        role: ``trainer`` for the process that runs the experiment, ``worker`` for any other.
        state: ``busy`` while it holds attempts, ``idle`` without any, ``gone`` when its signs of life ended.
        attempts: The attempts that it holds.
        since: Unix seconds by its own clock.
        seen_at: The last sign of life, in Unix seconds by the store's clock.
    """

    worker: str
    host: str
    pid: int
    experiment: str
    role: str
    state: str
    attempts: int
    since: float
    seen_at: float


async def list_workers(store: Store, experiment: str | None) -> list[ListedWorker]:
    """List the processes that run or take part in an experiment, or in all of them for ``None``."""
    held = await _held(store)
    return [
        _worker(record, presence, held)
        for record in await store.experiments(experiment)
        for presence in await store.presences(record.name)
    ]


async def _held(store: Store) -> Counter[str]:
    """Count the running attempts of each process."""
    held = Counter[str]()
    async for recording in read_recordings(store, RolloutQuery(status=("running",)), spans="none"):
        held.update(process_of(attempt.worker) for attempt in recording.attempts if attempt.status == "running")
    return held


def _worker(record: ExperimentRecord, presence: Presence, held: Counter[str]) -> ListedWorker:
    name = record.owner if presence.member == OWNER else presence.member
    process = process_of(name)
    host, _, pid = process.rpartition(":")
    is_gone = time.time() - presence.seen_at > GONE_S or worker_is_dead(name)
    return ListedWorker(
        worker=name,
        host=host.partition("@")[0],
        pid=int(pid) if pid.isdecimal() else 0,
        experiment=record.name,
        role="trainer" if presence.member == OWNER else "worker",
        state="gone" if is_gone else "busy" if held[process] else "idle",
        attempts=held[process],
        since=presence.since,
        seen_at=presence.seen_at,
    )
