"""Names the processes that run experiments, lists the processes of an experiment, and detects dead ones.

A restarted trainer thus need not wait until the leases of a dead process end.
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
"""Member name of the trainer in an experiment's presences; remote workers use their own names."""

_MULTICAST = 1 << 40
"""Bit of a hardware address that Python made up at random, because the machine has none."""


def worker_name() -> str:
    """Return ``host@host_id:pid:random``, which identifies the process that holds an attempt."""
    return f"{socket.gethostname()}@{host_id()}:{os.getpid()}:{new_trace_id()[:8]}"


def process_of(name: str) -> str:
    """Return the part of a worker's name that identifies its process: the name without the random end."""
    return name.rpartition(":")[0]


def host_id() -> str:
    """Return a digest of the machine and container; processes with equal digests share process ids and loopback.

    A host name does not suffice, because machines and containers may have equal names. On Linux the digest also covers
    the boot id and the namespaces of the process; on other systems it covers the hardware address.
    """
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        facts.extend(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    if len(facts) == 1 and not (address := uuid.getnode()) & _MULTICAST:
        facts.append(f"{address:x}")
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()


def worker_is_dead(name: str) -> bool:
    """Return true if a worker has certainly ended; false if it runs, or is not of this machine and container."""
    where, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    return where == f"{socket.gethostname()}@{host_id()}" and pid.isdigit() and not process_is_alive(int(pid))


def process_is_alive(pid: int) -> bool:
    """Return true if a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        pass
    return True


GONE_S = 15.0
"""Seconds without a sign of life after which a process counts as gone; a living process gives one every 4 s."""


class ListedWorker(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A process that takes part in an experiment.

    Attributes:
        worker: Its name, ``host@host_id:pid:random``.
        role: ``trainer`` for the process that runs the experiment, ``worker`` for any other.
        state: ``busy`` while it holds attempts, ``idle`` while it holds none, ``gone`` if its signs of life ended.
        attempts: Number of running attempts that it holds.
        since: Time from which it takes part, in Unix seconds by its own clock.
        seen_at: Time of its last sign of life, in Unix seconds by the store's clock.
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
    """List the trainer and the workers of an experiment; ``None`` lists those of all experiments."""
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
