"""Lists the processes that run experiments or take part in them, with their signs of life."""

import time
from collections import Counter

from agl.contracts import ExperimentRecord, Presence, RolloutQuery, Store
from agl.schemas import Record
from agl.stores import read_recordings
from agl_inspect.records.hosts import OWNER, process_of, worker_is_dead

GONE_S = 15.0
"""Seconds without a sign of life after which a process counts as gone; they come every four."""


class ListedWorker(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A process that takes part in an experiment.

    Attributes:
        worker: Its name, ``host@place:pid:random``.
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
