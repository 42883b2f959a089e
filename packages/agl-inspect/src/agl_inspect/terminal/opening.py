"""Opens the store that a command reads, and completes names from it.

The store is the one that ``--store`` names, or else the only one in ``runs/``. A completion must be quick and must
change nothing, so it reads SQLite files directly, and no other kind of store.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

import agl_store_sqlite
from agl import PluginManager
from agl.contracts import Store
from agl.errors import AglError, ConfigError
from agl_inspect.stores import SQLITE, as_url, build_store, refuse_directory, stores_in
from agl_inspect.terminal.output import echo, json_option, print_json

pass_manager = click.make_pass_decorator(PluginManager)
"""Decorator that passes the plugin manager to a command as the first argument."""


def manager_of(ctx: click.Context) -> PluginManager:
    """Return the plugin manager of this command line, made as ``--no-plugins`` and the environment require."""
    root = ctx.find_root()
    if not isinstance(root.obj, PluginManager):
        try:
            root.obj = PluginManager.from_environment(load=not root.params.get("no_plugins"))
        except AglError as error:
            raise click.ClickException(str(error)) from error
    return root.obj


def given_options(ctx: click.Context) -> dict[str, str]:
    """Return the options on the command line, such as ``--label``, by the names of their parameters."""
    return {
        param.name: max(param.opts, key=len)
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


T = TypeVar("T")

range_option = click.option(
    "--range",
    "ends",
    nargs=2,
    type=float,
    default=(0.0, 1.0),
    show_default="0 1",
    metavar="LOW HIGH",
    help="For a promotion on rewards: the smallest and the largest possible reward.",
)
"""Decorator that adds ``--range`` to a command, which gets both numbers as ``ends``."""

store_option = click.option(
    "--store",
    "store_url",
    envvar="AGL_STORE",
    help="URL of the store, or a SQLite file; by default $AGL_STORE, or else the file runs/*.db if there is "
    "exactly one.",
)
"""Decorator that adds ``--store`` to a command, which gets the value as ``store_url``; see :func:`with_store`."""


def with_store(manager: PluginManager, url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store that :func:`resolve_url` finds, run ``work`` on it, close it, and return the result."""
    import asyncio  # here, because commands that open no store do not need it

    found = resolve_url(url)
    result: list[T] = []

    async def use() -> None:
        store = build_store(manager, found)
        try:
            result.append(await work(store))
        finally:
            await store.close()

    # The coroutine returns nothing: asyncio.run formats its main task, result included, as it resets SIGINT's handler.
    asyncio.run(use())
    return result[0]


class Reading(NamedTuple):
    """The store that a command reads, and whether the command prints JSON."""

    manager: PluginManager
    url: str | None
    as_json: bool

    def read(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Open the store, run ``work`` on it, close it, and return the result."""
        return with_store(self.manager, self.url, work)

    def show(self, found: Any, lines: Callable[[], Iterable[str]]) -> None:
        """Print ``found`` as JSON if ``--json`` was given, else the lines that ``lines`` returns."""
        if self.as_json:
            print_json(found)
        else:
            for line in lines():
                echo(line)


def reads_store(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--store`` and ``--json`` to a command, which gets a :class:`Reading` as the first argument."""

    @wraps(command)
    def reading(manager: PluginManager, *args: Any, store_url: str | None, as_json: bool, **options: Any) -> Any:
        return command(Reading(manager, store_url, as_json), *args, **options)

    return store_option(json_option(pass_manager(reading)))


def new_store(manager: PluginManager, url: str, *, other_than: str) -> Store:
    """Open a store to write to, which may not exist yet; raises :class:`ConfigError` for ``other_than``."""
    found = as_url(url)
    refuse_directory(found, Path())
    if _place(found) == _place(other_than):
        raise ConfigError(f"{url} is the store to copy from; name another one to copy to")
    return build_store(manager, found)


def _place(url: str) -> str:
    return str(Path(url.removeprefix(SQLITE)).resolve()) if url.startswith(SQLITE) else url


def resolve_url(url: str | None, folder: Path = Path()) -> str:
    """Return the URL of the store to read; without ``url``, that of the only file ``runs/*.db``.

    Raises :class:`ConfigError` if a SQLite file is missing, because reading must not create it, or if ``runs/`` does
    not hold exactly one file.
    """
    if not url:
        return _only_file(folder)
    url = as_url(url)
    refuse_directory(url, folder)
    path = folder / url.removeprefix(SQLITE)
    if url.startswith(SQLITE) and not path.exists():
        raise ConfigError(
            f"there is no store {str(path)!r}; correct its path (in --store, AGL_STORE, or FROM), "
            "or run an experiment first"
        )
    return url


def _only_file(folder: Path) -> str:
    files = stores_in(folder)
    if not files:
        raise ConfigError(
            "nothing is recorded in this folder yet (found 0 of runs/*.db); run an experiment here, or name a store "
            f"with --store {SQLITE}PATH or AGL_STORE"
        )
    if len(files) != 1:
        found = f"found {len(files)} of runs/*.db" + "".join(f", {file.name}" for file in files[:5])
        raise ConfigError(
            f"which store? {found}; name one with --store {SQLITE}{files[0].as_posix()}, or set AGL_STORE"
        )
    return f"{SQLITE}{files[0]}"


LATEST = "latest"
"""The word that stands for the newest rollout in place of an id."""

_LISTED = 100
"""The most completions that are offered; typing more letters finds the others."""


def complete_rollout(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the id of a rollout, or ``latest``."""
    begins_latest = LATEST.startswith(incomplete) and _names(
        ctx, lambda path: agl_store_sqlite.rollout_ids(path, "", limit=1)
    )
    found = _names(ctx, lambda path: agl_store_sqlite.rollout_ids(path, incomplete, limit=_LISTED))
    return [LATEST, *found] if begins_latest else found


def complete_experiment(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an experiment."""
    return _names(ctx, lambda path: agl_store_sqlite.experiments(path, incomplete, limit=_LISTED))


def _names(ctx: click.Context, look: Callable[[Path], list[str]]) -> list[str]:
    import sqlite3  # imported here, because printing help needs no database

    try:
        url = resolve_url(ctx.params.get("store_url") or ctx.params.get("source"))
        return look(Path(url.removeprefix(SQLITE))) if url.startswith(SQLITE) else []
    except (AglError, sqlite3.Error, OSError):
        return []
