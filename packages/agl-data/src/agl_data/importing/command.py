"""``agl data import``: imports runs that other tools recorded."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from agl import PluginManager
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Mode
from agl.stores import TableStore
from agl_data.importing.importer import File, Imported, find_files, import_files
from agl_data.importing.readers import FORMATS
from agl_data.importing.runs import Target
from agl_inspect.stores import as_url, build_store, command
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.terminal.output import json_option, print_json
from agl_inspect.text import visible

FIRST_USER = "first-user"
DEFAULT_STORE = "sqlite:///runs/agl.db"
_FILE = "sqlite:///"
_NAMES = 20
"""The largest number of agents that the report names."""


@click.command("import")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="PATH...")
@click.option(
    "--format",
    "form",
    type=click.Choice(("auto", *FORMATS)),
    default="auto",
    show_default=True,
    help="Format of the files; auto detects it from a file's first record.",
)
@click.option(
    "--experiment", default="imported", show_default=True, help="Experiment for the rollouts; usable as a source."
)
@click.option(
    "--mode",
    type=click.Choice(("train", "val", "test")),
    default="train",
    show_default=True,
    help="The mode of the rollouts.",
)
@click.option(
    "--task-from",
    "task_from",
    metavar="FIELD",
    default=FIRST_USER,
    show_default=True,
    help="Field with the task, such as extra.task; first-user takes the first message of a user.",
)
@click.option("--reward", "reward_from", metavar="FIELD", default="", help="Field with the reward, a number.")
@click.option("--store", "url", envvar="AGL_STORE", help="URL of the store, or a SQLite file.  [sqlite:///runs/agl.db]")
@click.option("--dry-run", "is_dry", is_flag=True, help="Print what would be imported, and write nothing.")
@json_option
@pass_manager
def import_runs(
    manager: PluginManager,
    paths: tuple[Path, ...],
    form: str,
    experiment: str,
    mode: Mode,
    task_from: str,
    reward_from: str,
    url: str | None,
    is_dry: bool,
    as_json: bool,
) -> None:
    """Import runs of other tools as rollouts.

    PATH is a file, or a folder whose files are all read. Importing a run again only adds rewards that were missing.
    Files are checked before anything is written.
    """
    files, lost = find_files(paths, form)
    task_field = "" if task_from == FIRST_USER else task_from
    target = Target(experiment=experiment, mode=mode, task_from=task_field, reward_from=reward_from)
    store_url = as_url(url or DEFAULT_STORE)
    try:
        done = asyncio.run(_import(manager, store_url, files, target, lost=lost, is_dry=is_dry))
    except KeyboardInterrupt:
        click.echo("stopped; what is in the store stays, and the same command adds the rest", err=True)
        sys.exit(128 + signal.SIGINT)
    if as_json:
        print_json(done)
        return
    for line in report(done, store_url):
        click.echo(visible(line))


async def _import(
    manager: PluginManager, url: str, files: list[File], target: Target, *, lost: Counter[str], is_dry: bool
) -> Imported:
    """Open the store and import the files; a dry run does not create a store that does not exist."""
    is_new = url.startswith(_FILE) and not Path(url.removeprefix(_FILE)).exists()
    if is_dry and is_new:
        return await import_files(None, files, target, lost=lost, is_dry=True)
    store = build_store(manager, url)
    try:
        if not isinstance(store, TableStore):
            raise ConfigError(f"{url} takes no imports; name the database or the file that is behind it")
        return await import_files(store, files, target, lost=lost, is_dry=is_dry)
    finally:
        await store.close()


def report(done: Imported, url: str) -> Iterator[str]:
    """Yield the report's lines: what was imported, what was left out or incomplete, and the next command."""
    sources = ", ".join(f"{count_of(count, 'file')} of {name}" for name, count in done.files.items())
    ids = f", {done.calls_with_ids} with token ids" if done.calls_with_ids else ""
    yield (
        f"{'would import' if done.is_dry else 'imported'} {count_of(done.rollouts, 'run')} into {done.experiment!r} "
        f"from {sources}: {count_of(done.calls, 'model call')}{ids}, {count_of(done.tasks, 'task')}, "
        f"{count_of(done.rewards, 'new reward')}"
    )
    if done.agents:
        yield f"agents: {', '.join(f'{name} ({count})' for name, count in list(done.agents.items())[:_NAMES])}"
    if done.known:
        yield f"{count_of(done.known, 'run')} in the store already: not imported again"
    if done.changed:
        yield (
            f"{count_of(done.changed, 'run')} of them other than in the store, such as a session that went on, or with "
            "another task or mode; they stay as they are. Import them into another --experiment, or remove them first "
            "with agl runs rm"
        )
    if done.lost:
        yield "what does not arrive, or not whole:"
    width = len(str(max(done.lost.values(), default=0)))
    for text, count in done.lost.items():
        yield f"  {count:>{width}}  {text}"
    if done.rollouts and not done.is_dry:
        own = "" if url == DEFAULT_STORE else url
        yield f"look with: {command('runs', '--experiment', done.experiment, store_url=own)}"
