"""``agl workers``: list the processes that run experiments or take part in them, with their signs of life."""

import time
from collections import Counter

import click

from agl import PluginManager
from agl.contracts import ExperimentRecord, Presence, RolloutQuery, Store
from agl.schemas import Record
from agl.stores import read_recordings
from agl_run.cli.context import pass_manager
from agl_run.cli.opening import store_option, with_store
from agl_run.cli.output import json_option, print_json, print_table, when
from agl_run.experiment.serving import OWNER
from agl_run.runners.liveness import process_of, worker_is_dead

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


@click.command()
@click.option("--experiment", help="Only processes of this experiment.")
@store_option
@json_option
@pass_manager
def workers(manager: PluginManager, experiment: str | None, store_url: str | None, as_json: bool) -> None:
    """List the trainers and workers of the store's experiments, and whether they are busy, idle or gone.

    A trainer or worker reports every four seconds; without a report for 15 seconds, or with its process ended on this
    machine, it is gone.
    """
    found = with_store(manager, store_url, lambda store: list_workers(store, experiment))
    if as_json:
        print_json(found)
    elif found:
        columns = ("worker", "experiment", "role", "state", "attempts", "since", "last sign of life")
        print_table(columns, [_row(item) for item in found], least=("since", "role"))
    else:
        click.echo("no process takes part in an experiment of this store")


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


def _row(item: ListedWorker) -> tuple[str, ...]:
    name = f"{item.host}:{item.pid}" if item.pid else item.worker
    attempts, since, seen = str(item.attempts), when(item.since), when(item.seen_at)
    return name, item.experiment, item.role, item.state, attempts, since, seen
