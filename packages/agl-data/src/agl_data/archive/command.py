"""``agl data archive`` and ``agl data restore``."""

import asyncio
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec.structs import replace

from agl import PluginManager
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import RolloutStatus
from agl.stores import MemoryStore, TableStore
from agl.urls import shown_url
from agl_inspect.retention import FINISHED
from agl_inspect.stores import as_url, build_store, command
from agl_inspect.terminal.opening import pass_manager, resolve_url
from agl_inspect.terminal.output import json_option, print_json
from agl_inspect.terminal.query import seconds_of
from agl_inspect.text import visible
from agl_store_sqlite.sql.compaction import Compactable

if TYPE_CHECKING:
    from agl_data.archive.archiving import Archived, Choice
    from agl_data.archive.restoring import ArchivedPart, Restored

T = TypeVar("T")

_STOPPED = 130
_NAMED = 5
_FILE = "sqlite:///"

_own_store_option = click.option("--store", "store_url", help="URL of the store, or a SQLite file.")


@click.command("archive")
@click.argument("url", metavar="URL")
@_own_store_option
@click.option("--experiment", "experiments", multiple=True, help="Only rollouts of this experiment; repeatable.")
@click.option(
    "--older-than",
    type=seconds_of,
    metavar="DURATION",
    help="Only rollouts that finished longer ago than this, such as 30d.",
)
@click.option("--status", type=click.Choice(FINISHED), multiple=True, help="Only this status; repeatable.")
@click.option("--remove", "is_removing", is_flag=True, help="Remove rollouts once they are archived and verified.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only print the number of rollouts.")
@json_option
@pass_manager
@click.pass_context
def archive(
    ctx: click.Context,
    manager: PluginManager,
    url: str,
    store_url: str | None,
    experiments: tuple[str, ...],
    older_than: float | None,
    status: tuple[RolloutStatus, ...],
    is_removing: bool,
    is_dry_run: bool,
    as_json: bool,
) -> None:
    """Write finished rollouts as Parquet files to URL.

    URL is a folder, or an address with s3://, gs:// or az://, which needs a package for that storage. Rollouts that the
    archive already has are left out, so repeating the command continues it. DuckDB and pandas read the files.
    """
    from agl_data.archive.archiving import Choice

    choice = Choice(experiments=experiments, status=status or FINISHED, older_than_s=older_than or 0.0)
    found = resolve_url(store_url or ctx.meta.get("store_url"))
    done = _run(_archive(manager, found, url, choice, is_removing=is_removing, is_dry_run=is_dry_run))
    if as_json:
        print_json(done)
        return
    for line in _archive_report(done, url):
        click.echo(visible(line))


@click.command("restore")
@click.argument("url", metavar="URL")
@click.argument("rollouts", nargs=-1, metavar="[ROLLOUT]...")
@click.option("--store", "store_url", help="URL of the store, or a SQLite file, which may be new.")
@click.option("--experiment", "experiments", multiple=True, help="Only this experiment; repeatable.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Compare with the store, and write nothing.")
@json_option
@pass_manager
@click.pass_context
def restore(
    ctx: click.Context,
    manager: PluginManager,
    url: str,
    rollouts: tuple[str, ...],
    store_url: str | None,
    experiments: tuple[str, ...],
    is_dry_run: bool,
    as_json: bool,
) -> None:
    """Restore archived rollouts into a store.

    ROLLOUT is an id or a unique beginning of one; without any, all rollouts are restored. A rollout that the store has
    already stays; one with other contents is refused before its part is written.
    """
    from agl_data.archive.places import Place
    from agl_data.archive.restoring import find_parts

    parts = find_parts(Place(url), experiments=experiments, names=rollouts)
    named = store_url or ctx.meta.get("store_url")
    target = as_url(named) if named else resolve_url(None)
    done = _run(_restore(manager, target, parts, is_dry_run=is_dry_run))
    if as_json:
        print_json(done)
        return
    for line in _restore_report(done, target, is_dry_run=is_dry_run):
        click.echo(visible(line))


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        click.echo("\nstopped; what is written stays, and the same command adds the rest", err=True)
        sys.exit(_STOPPED)


async def _archive(
    manager: PluginManager, store_url: str, url: str, choice: "Choice", *, is_removing: bool, is_dry_run: bool
) -> "Archived":
    from agl_data.archive.archiving import Archiving
    from agl_data.archive.places import Place

    place = Place(url)
    store = build_store(manager, store_url)
    try:
        work = Archiving(store, place, choice=choice)
        with click.progressbar(length=await work.survey(), label="archiving rollouts", file=sys.stderr) as bar:
            done = await work.run(is_removing=is_removing, is_dry_run=is_dry_run, tell=bar.update)
        if done.removed and isinstance(store, Compactable):
            done = replace(done, compaction=await store.compact())
        return done
    finally:
        await store.close()


async def _restore(
    manager: PluginManager, store_url: str, parts: "list[ArchivedPart]", *, is_dry_run: bool
) -> "Restored":
    from agl_data.archive.restoring import restore_parts

    is_new = store_url.startswith(_FILE) and not Path(store_url.removeprefix(_FILE)).exists()
    store = MemoryStore() if is_dry_run and is_new else build_store(manager, store_url)
    try:
        if not isinstance(store, TableStore):
            raise ConfigError(
                f"{store_url} takes no restored rollouts; name the database or the file that is behind it"
            )
        total = sum(part.wanted for part in parts)
        with click.progressbar(length=total, label="restoring rollouts", file=sys.stderr) as bar:
            return await restore_parts(store, parts, tell=bar.update, is_dry_run=is_dry_run)
    finally:
        await store.close()


def _archive_report(done: "Archived", url: str) -> Iterator[str]:
    size = f" ({done.bytes / (1 << 20):.1f} MiB)" if done.bytes else ""
    of = f" of {count_of(len(done.experiments), 'experiment')}" if done.experiments else ""
    yield f"{'would archive' if done.is_dry_run else 'archived'} {count_of(done.rollouts, 'rollout')}{of}{size}"
    if done.known:
        yield f"{count_of(done.known, 'rollout')} in the archive already: not written again"
    if done.others:
        whose = "whose id" if len(done.others) == 1 else "whose ids"
        yield (
            f"left out {count_of(len(done.others), 'rollout')} of another run, {whose} the archive has already: "
            f"{_listed(done.others)}; archive into another folder"
        )
    if done.damaged:
        yield (
            f"left out {count_of(len(done.damaged), 'rollout')} with damaged attempts or spans: "
            f"{_listed(done.damaged)}; the store keeps what is left of them"
        )
    if done.removed:
        yield f"read back and compared, and removed from the store: {count_of(done.removed, 'rollout')}"
    if done.compaction is not None:
        sizes = done.compaction.after / (1 << 20), done.compaction.before / (1 << 20)
        yield "the store has {:.1f} MiB instead of {:.1f} MiB".format(*sizes)
    if done.needed:
        yield f"kept {count_of(done.needed, 'rollout')} of experiments that are not finished"
    if done.changed:
        yield (
            f"kept {count_of(len(done.changed), 'rollout')} that changed after the archiving, such as by a late "
            f"reward: {_listed(done.changed)}; archive them into another folder, or remove them with agl runs rm"
        )
    if done.rollouts and not done.is_dry_run:
        yield f"bring them back with: {command('data', 'restore', shown_url(url))}"


def _restore_report(done: "Restored", store_url: str, *, is_dry_run: bool) -> Iterator[str]:
    of = f" of {count_of(len(done.experiments), 'experiment')}" if done.experiments else ""
    yield f"{'would restore' if is_dry_run else 'restored'} {count_of(done.rollouts, 'rollout')}{of}"
    if done.known:
        yield f"{count_of(done.known, 'rollout')} in the store already: not written again"
    if done.rollouts and not is_dry_run:
        yield f"look with: {command('runs', store_url=store_url)}"


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (" and more" if len(ids) > _NAMED else "")
