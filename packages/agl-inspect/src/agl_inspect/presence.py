"""Names the processes that take part in experiments, renews their presences, and finds those that have ended.

A process renews its presence while it lives. It is gone once its lease has ended, or at once if it ended on the
machine that asks: a restarted trainer thus need not wait until the leases of a dead process end.
"""

import asyncio
import hashlib
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from agl.contracts import Presence, RolloutQuery, Store
from agl.errors import FencedError, StoreError
from agl.schemas import Record, new_trace_id
from agl.stores import read_recordings

_LOG = logging.getLogger("agl_run.run")

OWNER = ""
"""Member name of the trainer among an experiment's presences; each worker has a name of its own."""

BEAT_S = 4.0
"""Seconds between two renewals of a presence with the usual lease."""

_MULTICAST = 1 << 40
"""The bit of a hardware address that is set if Python made the address up, because the machine has none."""


def worker_name() -> str:
    """Return a new name for this process as the holder of leases: ``host@host_id:pid:random``."""
    return f"{socket.gethostname()}@{host_id()}:{os.getpid()}:{new_trace_id()[:8]}"


def process_of(name: str) -> str:
    """Return a worker's name without its random end, which identifies the process."""
    return name.rpartition(":")[0]


def host_of(name: str) -> str:
    """Return the host name of a worker's machine, which is part of the worker's name."""
    return name.partition("@")[0]


def pid_of(name: str) -> int:
    """Return the process id in a worker's name; 0 if the name has none."""
    pid = process_of(name).rpartition(":")[2]
    return int(pid) if pid.isdecimal() else 0


def host_id() -> str:
    """Return a digest of the machine and container that this process runs in.

    Processes with equal digests see the same process ids and the same loopback interface.

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


def is_of_this_machine(name: str) -> bool:
    """Return true if the worker with this name runs, or ran, on this machine and in this container."""
    return name.partition(":")[0] == f"{socket.gethostname()}@{host_id()}"


def worker_is_dead(name: str) -> bool:
    """Return true if the worker with this name has certainly ended, which is only known for this machine."""
    return is_of_this_machine(name) and pid_of(name) > 0 and not process_is_alive(pid_of(name))


def process_is_alive(pid: int) -> bool:
    """Return true if a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        pass
    return True


def is_gone(presence: Presence, *, now: float) -> bool:
    """Return true if a member's lease has ended at ``now`` (Unix seconds), or its process on this machine has."""
    return now - presence.seen_at > presence.lease_s or worker_is_dead(presence.member or presence.session)


async def renew(announce: Callable[[], Awaitable[None]], *, every_s: float, title: str) -> None:
    """Renew a process's presence every ``every_s`` seconds, until this is cancelled or the lease is lost.

    A store that does not answer is reported once, and tried again. ``title`` names the process in that report.
    """
    level = logging.WARNING
    while True:
        await asyncio.sleep(every_s)
        try:
            await announce()
            level = logging.WARNING
        except FencedError:
            return
        except StoreError as error:
            _LOG.log(level, "the store could not record that %s still runs: %s", title, error)
            level = logging.DEBUG


class ListedWorker(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A process that takes part in an experiment.

    Attributes:
        worker: The process's name, ``host@host_id:pid:random``.
        role: ``trainer`` for the process that runs the experiment, ``worker`` for any other.
        state: ``busy`` while the process holds attempts, ``idle`` while it holds none, ``gone`` if its lease has ended.
        attempts: Number of running attempts that the process holds.
        since: Time from which the process takes part, in Unix seconds by the process's clock.
        seen_at: Time of the last renewal, in Unix seconds by the store's clock.
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
    held = Counter[str]()
    async for recording in read_recordings(store, RolloutQuery(status=("running",)), spans="none"):
        held.update(process_of(attempt.worker) for attempt in recording.attempts if attempt.status == "running")
    return [
        _worker(presence, held)
        for record in await store.experiments(experiment)
        for presence in await store.presences(record.name)
    ]


def _worker(presence: Presence, held: Counter[str]) -> ListedWorker:
    name = presence.member or presence.session
    attempts = held[process_of(name)]
    return ListedWorker(
        worker=name,
        host=host_of(name),
        pid=pid_of(name),
        experiment=presence.experiment,
        role="worker" if presence.member else "trainer",
        state="gone" if is_gone(presence, now=time.time()) else "busy" if attempts else "idle",
        attempts=attempts,
        since=presence.since,
        seen_at=presence.seen_at,
    )
