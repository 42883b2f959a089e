"""``agl runs``: lists recorded rollouts and workers, rates and removes rollouts, and tidies old ones.

Removal is always explicit. It never removes a rollout that is not finished, nor, without ``--force``, a rollout of an
experiment that can be resumed.
"""

import math
from collections.abc import Sequence
from typing import Literal

import click
import msgspec

from agl import PluginManager
from agl.contracts import RolloutQuery, Store
from agl.errors import ConfigError, ConflictError, NotFoundError
from agl.hints import count_of
from agl.schemas import Record, Reward, Rollout
from agl.stores import read_recordings
from agl.tracing import make_reward_span
from agl_inspect.ownership import is_owned
from agl_inspect.presence import ListedWorker, list_workers
from agl_inspect.records.state import unfinished_experiments
from agl_inspect.retention import (
    LEAST_FREED,
    GarbageReport,
    RetentionLimits,
    compacted,
    parse_size,
    remove_old,
)
from agl_inspect.rollouts.span_reader import reward_of
from agl_inspect.terminal.opening import (
    Reading,
    complete_experiment,
    complete_rollout,
    given_options,
    pass_manager,
    reads_store,
    store_option,
    with_store,
)
from agl_inspect.terminal.output import print_json, print_table, when
from agl_inspect.terminal.program import OpenGroup
from agl_inspect.terminal.query import check_experiment, filter_options, find, find_ids, make_query, seconds_of
from agl_inspect.text import short
from agl_store_sqlite.sql.compaction import Compaction, Measured

_PAGE = 500

_SORTS: dict[str, Literal["rollout_id", "created_at", "finished_at", "status"]] = {
    **{"id": "rollout_id", "created": "created_at", "finished": "finished_at", "status": "status"}
}

_REWARD = "reward"
"""The sort option that the command itself implements, as no store sorts by reward; unrewarded rollouts come last."""


def _bytes_of(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class ListedRollout(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rollout and its reward."""

    rollout: Rollout
    reward: float | None


@click.group(cls=OpenGroup, invoke_without_command=True)
@filter_options
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Largest number of rollouts to list.",
)
@click.option("--contains", default="", metavar="TEXT", help="Only rollouts whose id or task contains TEXT.")
@click.option(
    "--sort",
    type=click.Choice((*_SORTS, _REWARD)),
    default="id",
    show_default=True,
    help="Sort by this, in descending order. Sorting by reward reads all matching rollouts.",
)
@click.option("--ascending", is_flag=True, help="Sort in ascending order.")
@click.option("--count", "counts", is_flag=True, help="Only print the number of rollouts.")
@reads_store
def runs(
    store: Reading,
    experiment: str | None,
    status: tuple[str, ...],
    mode: str | None,
    limit: int,
    contains: str,
    sort: str,
    ascending: bool,
    counts: bool,
) -> None:
    """List recorded rollouts, by default in descending order of id, so that the newest of an experiment come first."""
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    query = msgspec.structs.replace(
        make_query(experiment, status, mode, limit=limit),
        contains=contains,
        sort=_SORTS.get(sort, "rollout_id"),
        is_newest_first=not ascending,
    )
    found, total = store.read(lambda opened: _listed(opened, query, counts=counts, by_reward=sort == _REWARD))
    if store.as_json or counts:
        print_json(total if counts else found)
        return
    print_table(
        ("rollout", "experiment", "mode", "status", "tries", "reward", "created", "task"),
        [_row(item) for item in found],
        least=("task", "created", "experiment", "tries", "mode"),
    )
    if total > len(found):
        click.echo(f"({len(found)} of {total:,} rollouts; --limit shows more)", err=True)


def _refuse_options(ctx: click.Context) -> None:
    """Raise :class:`click.UsageError` if an option of the list is given before a subcommand.

    Otherwise ``gc``, for example, would ignore ``--experiment`` and remove the rollouts of other experiments.
    """
    for option in given_options(ctx).values():
        raise click.UsageError(
            f"{option} is for the list of agl runs, and agl runs {ctx.invoked_subcommand} would ignore it; "
            f"write the options of {ctx.invoked_subcommand} after its name",
            ctx,
        )


@runs.command("rm")
@click.argument("rollout_ids", nargs=-1, required=True, shell_complete=complete_rollout)
@store_option
@click.option("--force", is_flag=True, help="Also remove rollouts of an experiment that could still be resumed.")
@pass_manager
def remove(manager: PluginManager, rollout_ids: tuple[str, ...], store_url: str | None, force: bool) -> None:
    """Remove finished and damaged rollouts by id.

    Their attempts and spans are removed too. A unique beginning of an id is enough, unless the rollout is damaged.
    """
    count, damaged = with_store(manager, store_url, lambda store: _remove(store, rollout_ids, force=force))
    named = f", {len(damaged)} of them damaged: {', '.join(damaged)}" if damaged else ""
    click.echo(f"removed {count_of(count, 'rollout')}{named}")


@runs.command("rate")
@click.argument("rollout_id", shell_complete=complete_rollout)
@click.argument("rating", metavar="up|down|SCORE")
@click.option("--feedback", default="", help="The reason for the rating as text, which prompt optimisers read.")
@store_option
@pass_manager
def rate(manager: PluginManager, rollout_id: str, rating: str, feedback: str, store_url: str | None) -> None:
    """Add a person's reward to a finished rollout.

    up gives the reward 1, down gives 0. If an evaluator or the environment also gave a reward, that one trains instead.
    """
    try:
        value = {"up": 1.0, "down": 0.0}[rating] if rating in ("up", "down") else float(rating)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise click.UsageError(f"the rating is up, down or a number, not {rating!r}")
    reward = Reward(value=value, source="human", feedback=feedback)
    rated = with_store(manager, store_url, lambda store: _rate(store, rollout_id, reward))
    click.echo(f"rated {rated} with {value:g}")


async def _rate(store: Store, name: str, reward: Reward) -> str:
    (rollout_id,) = await find_ids(store, [name])
    (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
    if not rollout.is_finished:
        raise ConflictError(f"the rollout {rollout_id} is still {rollout.status}; rate it when it has finished")
    await store.append_spans([make_reward_span(rollout_id, rollout.attempt_id or "", reward)])
    return rollout_id


@runs.command("gc")
@click.option(
    "--older-than", type=seconds_of, metavar="DURATION", help="Only rollouts that finished at least this long ago."
)
@click.option("--keep", type=click.IntRange(min=0), help="Always keep this many of the newest finished rollouts.")
@click.option("--max-size", type=_bytes_of, metavar="SIZE", help="Stop once the data fit into this size, such as 10GB.")
@click.option("--experiment", shell_complete=complete_experiment, help="Only rollouts of this experiment.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@reads_store
def collect_garbage(
    store: Reading,
    older_than: float | None,
    keep: int | None,
    max_size: int | None,
    experiment: str | None,
    dry_run: bool,
) -> None:
    """Remove old finished rollouts and return their space.

    Rollouts that an unfinished experiment needs are never removed.
    """
    limits = RetentionLimits.of(older_than, keep, max_size)
    if limits is None:
        raise ConfigError("gc needs a limit: pass --older-than 7d, --keep 1000, --max-size 10GB, or several")
    query = RolloutQuery(experiment=experiment)

    async def collect(opened: Store) -> GarbageReport:
        return await compacted(opened, await remove_old(opened, query, limits, is_dry_run=dry_run))

    done = store.read(collect)
    if store.as_json:
        print_json(done)
        return
    click.echo(f"{'would remove' if dry_run else 'removed'} {count_of(len(done.removed), 'rollout')}")
    if done.kept_for_experiments:
        click.echo(f"kept {done.kept_for_experiments} of experiments that are not finished")
    if done.compaction is not None and done.compaction.before - done.compaction.after >= LEAST_FREED:
        click.echo(_sizes(done.compaction))
    if max_size is not None and (done.size or 0) > max_size:
        left, most = (done.size or 0) / 1e6, max_size / 1e6
        click.echo(
            f"its data still take {left:,.1f} MB instead of {most:,.1f} MB: the rest is needed, not finished, "
            "within the other limits, or no rollout"
        )


@runs.command("vacuum")
@reads_store
def vacuum(store: Reading) -> None:
    """Return unused space to the file system.

    This includes the space that gc leaves for new rollouts. Nothing else can use the store meanwhile, so the command is
    refused while rollouts or an experiment run.
    """
    done = store.read(_vacuum)
    store.show(done, lambda: [_sizes(done)])


def _sizes(compaction: Compaction) -> str:
    return f"the store has {compaction.after / (1 << 20):.1f} MiB instead of {compaction.before / (1 << 20):.1f} MiB"


async def _vacuum(store: Store) -> Compaction:
    if not isinstance(store, Measured):
        raise ConfigError(f"{store!r} has no space to return; name the SQLite file or the database that is behind it")
    running = await store.rollouts(RolloutQuery(status=("running",), limit=1))
    if running:
        raise ConflictError(
            f"rollout {running[0].rollout_id!r} is running, and would have to wait for the store; stop what runs it, "
            "or wait until it has finished"
        )
    for record in await store.experiments():
        if await is_owned(store, record.name):
            raise ConflictError(
                f"the experiment {record.name!r} is running, and would have to wait for the store; stop it, or wait "
                "until it has finished"
            )
    return await store.vacuum()


async def _listed(
    store: Store, query: RolloutQuery, *, counts: bool, by_reward: bool
) -> tuple[list[ListedRollout], int]:
    """Return one page of rollouts, and the number of all matching rollouts; with ``counts``, the page is empty."""
    found: list[ListedRollout] = []
    await check_experiment(store, query.experiment)
    total = await store.count_rollouts(query)
    if counts:
        return found, total
    if by_reward:
        return await _best(store, query), total
    async for recording in read_recordings(store, query, spans="none"):
        found.append(ListedRollout(rollout=recording.rollout, reward=reward_of(recording)))
        if len(found) == query.limit:
            break
    return found, total


async def _best(store: Store, query: RolloutQuery) -> list[ListedRollout]:
    """Return the rollouts with the highest rewards, or lowest if ascending; memory holds at most twice the limit."""
    found: list[ListedRollout] = []
    every = msgspec.structs.replace(query, limit=_PAGE)
    async for recording in read_recordings(store, every, spans="none"):
        found.append(ListedRollout(rollout=recording.rollout, reward=reward_of(recording)))
        if len(found) >= 2 * query.limit:
            found = _first(found, query)
    return _first(found, query)


def _first(found: Sequence[ListedRollout], query: RolloutQuery) -> list[ListedRollout]:
    sign = -1 if query.is_newest_first else 1

    def place(item: ListedRollout) -> tuple[bool, float]:
        return item.reward is None, sign * (item.reward or 0.0)

    return sorted(found, key=place)[: query.limit]


def _row(item: ListedRollout) -> tuple[str, ...]:
    rollout = item.rollout
    reward = "" if item.reward is None else f"{item.reward:g}"
    task = short(rollout.visible_task, 40)
    created = when(rollout.created_at)
    tries = str(rollout.attempts)
    return rollout.rollout_id, rollout.experiment, rollout.mode, rollout.status, tries, reward, created, task


async def _remove(store: Store, names: Sequence[str], *, force: bool) -> tuple[int, list[str]]:
    """Remove rollouts; returns their number, and the ids of those that were damaged."""
    found: dict[str, Rollout] = {}
    damaged: list[str] = []
    for name in dict.fromkeys(names):
        try:
            rollout = await find(store, name)
            found[rollout.rollout_id] = rollout
        except NotFoundError as error:
            if not error.is_damaged:
                raise
            damaged.append(error.key)
    running = set[str]() if force else await unfinished_experiments(store)
    if damaged and running:
        raise ConflictError(
            f"the record of rollout {damaged[0]} cannot be read, and the experiment {min(running)!r} is not finished "
            "and may need it to resume; finish the experiment, or pass --force, and --resume runs the rollout again"
        )
    for rollout in found.values():
        if rollout.experiment in running:
            raise ConflictError(
                f"the rollout {rollout.rollout_id} belongs to the experiment {rollout.experiment!r}, which is not "
                "finished and needs it to resume; finish the experiment, or pass --force"
            )
    return await store.delete([*found, *damaged]), damaged


@runs.command()
@click.option("--experiment", help="Only processes of this experiment.")
@reads_store
def workers(store: Reading, experiment: str | None) -> None:
    """List trainers and workers, and their state.

    Each is busy, idle or gone. A trainer or worker reports every four seconds. It is gone after 15 seconds without a
    report, or once its process on this machine has ended.
    """
    found = store.read(lambda opened: list_workers(opened, experiment))
    if store.as_json:
        print_json(found)
    elif found:
        columns = ("worker", "experiment", "role", "state", "attempts", "since", "last sign of life")
        print_table(columns, [_worker_row(item) for item in found], least=("since", "role"))
    else:
        click.echo("no process takes part in an experiment of this store")


def _worker_row(item: ListedWorker) -> tuple[str, ...]:
    name = f"{item.host}:{item.pid}" if item.pid else item.worker
    attempts, since, seen = str(item.attempts), when(item.since), when(item.seen_at)
    return name, item.experiment, item.role, item.state, attempts, since, seen
