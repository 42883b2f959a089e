"""``agl data copy``: copies experiments from one store to another, of the same or another kind.

The record of an experiment is copied last, after everything else. After an interruption the target therefore does not
list the experiment yet, and repeating the command completes the copy: records that are already there are left alone.
"""

import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import click

from agl import PluginManager
from agl.contracts import ExperimentRecord, Recording, RolloutQuery, Store, Trained
from agl.errors import ConfigError, ConflictError, NotFoundError
from agl.hints import count_of, did_you_mean
from agl.schemas import Record, blob_digests
from agl.stores import TableStore, is_readable, read_recordings
from agl_inspect.terminal.opening import complete_experiment, new_store, pass_manager, resolve_url, with_store
from agl_inspect.terminal.output import json_option, print_json
from agl_inspect.terminal.query import pages

_NAMED = 10
_ROLLOUTS, _SPANS, _ROWS = 200, 5_000, 1_000
"""Largest numbers of rollouts, of spans and of other records in one write."""
BLOBS_AT_ONCE = 2
"""The number of blobs in memory, and in one request to a store; each may have 20 MB."""

Tell = Callable[[int], None]
"""A function that takes the number of rollouts handled since its previous call."""


class Copied(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of a copy.

    Attributes:
        experiments: Names of the copied experiments.
        rollouts: Number of copied rollouts.
        known: Number of rollouts that the target already had.
        damaged: Ids of rollouts with an attempt or a span that cannot be read, which are not copied.
    """

    experiments: list[str]
    rollouts: int
    known: int
    damaged: list[str]


@click.command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--experiment",
    "names",
    multiple=True,
    shell_complete=complete_experiment,
    help="Only this experiment; repeatable.",
)
@json_option
@pass_manager
def copy(manager: PluginManager, source: str, target: str, names: tuple[str, ...], as_json: bool) -> None:
    """Copy experiments to another store.

    The copy has their rollouts, attempts, spans, pictures, resources, labels, metrics, states and ledgers.
    """
    found = resolve_url(source)

    async def work(store: Store) -> Copied:
        copied_to = new_store(manager, target, other_than=found)
        try:
            if not isinstance(copied_to, TableStore):
                raise ConfigError(f"{target} takes no copies; name the database or the file that is behind it")
            return await _copied(store, copied_to, names)
        finally:
            await copied_to.close()

    done = with_store(manager, found, work)
    if as_json:
        print_json(done)
        return
    known = f"; {done.known} were there already" if done.known else ""
    if done.damaged:
        click.echo(
            f"left out {count_of(len(done.damaged), 'rollout')} with damaged attempts or spans: "
            f"{', '.join(done.damaged[:_NAMED])}{' and more' if len(done.damaged) > _NAMED else ''}"
        )
    click.echo(f"copied {count_of(len(done.experiments), 'experiment')}, {count_of(done.rollouts, 'rollout')}{known}")


async def _copied(source: Store, target: TableStore, names: Sequence[str]) -> Copied:
    """Check that the experiments can be copied, and copy them; a terminal shows a progress bar."""
    records = [record for record in await source.experiments() if not names or record.name in names]
    resources = await _survey(source, names)
    unknown = sorted(set(names).difference(resources, (record.name for record in records)))
    if unknown:
        every = [record.name for record in await source.experiments()]
        listed = "agl runs lists the rollouts with their experiments"
        raise NotFoundError("experiment", unknown[0], did_you_mean(unknown[0], every, otherwise=listed))
    await _refuse_others(records, target)
    chosen = {name for record in records for name in record.live}.union(*(found for _, found in resources.values()))
    await _copy_resources(source, target, sorted(chosen) if names else [each.name for each in await source.resources()])
    total = sum(count for count, _ in resources.values())
    with click.progressbar(length=total, label="copying rollouts", file=sys.stderr) as bar:
        damaged: list[str] = []
        new = [await _copy_rollouts(source, target, name, bar.update, damaged) for name in resources]
    for name in sorted({record.name for record in records}.union(resources)):
        await _copy_metrics(source, target, name)
    await _copy_other_states(source, target, names)
    for record in records:
        await _copy_experiment(source, target, record)
    experiments = sorted({record.name for record in records}.union(resources))
    return Copied(experiments=experiments, rollouts=sum(new), known=total - sum(new) - len(damaged), damaged=damaged)


async def _survey(source: Store, names: Sequence[str]) -> dict[str, tuple[int, set[str]]]:
    """Count each experiment's rollouts and find the resources they used; raises ConflictError for a running rollout."""
    counts: defaultdict[str, int] = defaultdict(int)
    used: defaultdict[str, set[str]] = defaultdict(set)
    for query in [RolloutQuery(experiment=name) for name in names] or [RolloutQuery()]:
        async for page in pages(source, query):
            for rollout in page:
                if rollout.status == "running":
                    raise ConflictError(
                        f"rollout {rollout.rollout_id!r} is running; stop what runs the experiment "
                        f"{rollout.experiment!r}, or wait until it has finished, and copy it then"
                    )
                counts[rollout.experiment] += 1
                used[rollout.experiment] |= set(rollout.resources)
    return {name: (count, used[name]) for name, count in counts.items()}


async def _refuse_others(records: Sequence[ExperimentRecord], target: Store) -> None:
    there = {record.name: record for record in await target.experiments()}
    other = [record.name for record in records if there.get(record.name, record) != record]
    if other:
        raise ConflictError(
            f"the target has an experiment {other[0]!r} that went another way; nothing was copied: copy into a store "
            "without it, or only other experiments with --experiment"
        )


async def _copy_resources(source: Store, target: TableStore, names: Sequence[str]) -> None:
    """Copy every version of the resources, in order of publication, with their scores and labels."""
    for name in names:
        versions = await source.resources(name)
        for start in range(0, len(versions), _ROWS):
            await target.publish(versions[start : start + _ROWS])
        await target.save_scores(await source.scores(name))
        for newest in await source.labels(name):
            moves = await source.label_moves(name, newest.label)
            there = await target.label_moves(name, newest.label)
            if there != moves[: len(there)]:
                raise ConflictError(
                    f"the label {newest.label!r} of {name!r} was moved otherwise in the target; copy into a store "
                    "without it"
                )
            await target.restore([], moves=moves)


async def _copy_rollouts(source: Store, target: TableStore, experiment: str, tell: Tell, damaged: list[str]) -> int:
    """Copy an experiment's rollouts, and add the ids of damaged ones to ``damaged``; returns how many are new."""
    new = 0
    async for batch in _batches(source, RolloutQuery(experiment=experiment)):
        whole = [recording for recording in batch if is_readable(recording)]
        damaged += [recording.rollout.rollout_id for recording in batch if not is_readable(recording)]
        await _copy_blobs(source, target, digests_of(whole))
        new += len(await target.restore(whole))
        tell(len(batch))
    return new


def digests_of(recordings: Iterable[Recording]) -> list[str]:
    """Return the digests of all blobs that calls refer to, each once."""
    spans = (span for recording in recordings for span in recording.spans)
    return list(dict.fromkeys(digest for span in spans for digest in blob_digests(span)))


async def _copy_blobs(source: Store, target: Store, digests: Sequence[str]) -> None:
    """Copy blobs to another store; those that the source lacks are left out."""
    for start in range(0, len(digests), BLOBS_AT_ONCE):
        await target.save_blobs(await source.blobs(digests[start : start + BLOBS_AT_ONCE]))


async def _batches(source: Store, query: RolloutQuery) -> AsyncIterator[list[Recording]]:
    batch: list[Recording] = []
    spans = 0
    async for recording in read_recordings(source, query, spans="all"):
        batch.append(recording)
        spans += len(recording.spans)
        if len(batch) >= _ROLLOUTS or spans >= _SPANS:
            yield batch
            batch, spans = [], 0
    if batch:
        yield batch


async def _copy_metrics(source: Store, target: Store, experiment: str) -> None:
    metrics = await source.metrics(experiment)
    for start in range(0, len(metrics), _ROWS):
        await target.log_metrics(metrics[start : start + _ROWS])


async def _copy_other_states(source: Store, target: Store, names: Sequence[str]) -> None:
    """Copy the states that belong to no experiment; does nothing if only named experiments are copied."""
    states = {} if names else await source.load_state("")
    await target.save_state(
        {key: value for key, value in states.items() if not key.startswith(("experiment/", "gateway/"))}
    )


async def _copy_experiment(source: Store, target: Store, record: ExperimentRecord) -> None:
    """Copy the ledgers, then the states with the experiment's record, which makes the target list the experiment."""
    found = await source.load_state(f"experiment/{record.name}/")
    # Exporters note there how far they have read the change feed, and the target has another one.
    states = {key: value for key, value in found.items() if key.split("/")[2] != "exporter"}
    for key in states:
        _, _, run, kind, algorithm = [*key.split("/", 4), "", ""][:5]
        if kind == "algorithm" and run.isdecimal():
            await _copy_ledger(source, target, record.name, run=int(run), algorithm=algorithm)
    await target.save_state(states, experiment=record)


async def _copy_ledger(source: Store, target: Store, experiment: str, *, run: int, algorithm: str) -> None:
    steps: defaultdict[int, list[str]] = defaultdict(list)
    for rollout_id, step in (await source.trained(experiment, run=run, algorithm=algorithm)).items():
        steps[step].append(rollout_id)
    entries = [
        Trained(experiment=experiment, run=run, algorithm=algorithm, step=step, rollout_ids=tuple(ids))
        for step, ids in sorted(steps.items())
    ]
    for start in range(0, len(entries), 50):
        await target.save_state({}, trained=entries[start : start + 50])
