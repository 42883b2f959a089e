"""Shared functions of commands that take an experiment file: read it, override its keys, create the trainer."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from agl import PluginManager
from agl.algorithms import AlgorithmConfig, ComponentConfig
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_inspect.stores import command, located
from agl_inspect.terminal.opening import resolve_url
from agl_run.config.file import load_config, load_data, parse_config
from agl_run.config.sections import ExperimentConfig
from agl_run.display.progress import Progress
from agl_run.run.trainer import Trainer
from agl_run.worker.cluster_share import on_ray

__all__ = ["experiment_argument", "make_trainer", "ray_option", "read_experiment", "run_again", "store_of"]

F = TypeVar("F", bound=Callable[..., Any])

_KEYS = {"algorithm": AlgorithmConfig.__struct_fields__, "reward": ComponentConfig.__struct_fields__}
"""The file's sections that are arrays of tables, with the keys of each table."""


def experiment_argument(function: F) -> F:
    """Add the argument for the experiment file and the option ``--set`` to a command."""
    function = click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key, such as experiment.seed=3."
    )(function)
    return click.argument("file", type=click.Path(path_type=Path))(function)


ray_option = click.option(
    "--ray",
    "ray_address",
    metavar="auto|ADDRESS",
    help="Run the agents on the Ray cluster at HOST:PORT. auto uses the cluster at $RAY_ADDRESS; without this "
    "variable, it uses the cluster on this machine or starts a new one.",
)
"""The command-line option ``--ray``, which places an experiment's workers on a Ray cluster."""


def make_trainer(
    file: Path,
    settings: tuple[str, ...],
    *,
    manager: PluginManager,
    progress: Progress | None = None,
    ray_address: str | None = None,
) -> Trainer:
    """Create the trainer that the file describes; raises :class:`ConfigError` if the file is wrong."""
    config, plugins = read_experiment(file, settings, manager=manager)
    if ray_address is not None:
        config = on_ray(config, ray_address)
    return Trainer.from_config(config, folder=file.absolute().parent, plugins=plugins, progress=progress)


def read_experiment(
    file: Path, settings: tuple[str, ...], *, manager: PluginManager
) -> tuple[ExperimentConfig, PluginManager]:
    """Read the file, apply ``--set``, and load the plugins; raises :class:`ConfigError` if anything is wrong."""
    config = load_config(file)
    if settings:
        data = load_data(file)
        for setting in settings:
            _override(data, setting)
        config = parse_config(data, source=f"{file} with --set")
    disabled = config.plugins.get("disabled", ())
    # A file may disable plugins for its own experiment, on top of what the command line does.
    plugins = PluginManager.from_environment(disabled, environ=manager.worker_env()) if disabled else manager
    return config, plugins


def store_of(config: ExperimentConfig, file: Path) -> str:
    """Return the URL of the experiment's store; a relative SQLite path is joined to the folder of ``file``.

    Raises:
        ConfigError: The SQLite file does not exist.
    """
    return resolve_url(located(config.experiment.store, file.absolute().parent))


def _override(data: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"--set {setting!r} is not of the form KEY=VALUE, such as experiment.seed=3")
    *tables, last = key.strip().split(".")
    table: Any = data
    try:
        for position, name in enumerate(tables):
            table = _enter(table, name, ".".join(tables[:position]))
        _table_with(table, last, ".".join(tables))[last] = _value(text)
    except ConfigError as error:
        raise ConfigError(f"--set {setting!r}: {error}") from None


def _enter(table: Any, name: str, path: str) -> Any:
    """Return the value under ``name`` in a table or an array of tables; a missing one is created."""
    if isinstance(table, list) and name not in _KEYS.get(path, ()):
        return _entry(_tables(cast("list[Any]", table), path), name)
    return _table_with(table, name, path).setdefault(name, [] if not path and name in _KEYS else {})


def _table_with(table: Any, key: str, path: str) -> dict[str, Any]:
    """Return the table in which to set ``key``: ``table`` itself, or the only table of an array."""
    if isinstance(table, dict):
        return cast("dict[str, Any]", table)
    if not isinstance(table, list):
        raise ConfigError(f"{path!r} is {table!r}, which has no keys; write --set {path}=VALUE")
    items = _tables(cast("list[Any]", table), path)
    if key not in _KEYS.get(path, ()):
        raise ConfigError(
            f"{path!r} is a list of tables, and {key!r} is not a key of one, as in {path}.0.use=NAME; an "
            f"argument of it goes under params, as in {path}.params.{key}=VALUE"
        )
    if not items:
        items.append({})
    if len(items) > 1:
        raise ConfigError(
            f"there are {len(items)} entries in {path!r}; say which: "
            + " or ".join(f"{path}.{position}.{key}" for position in range(len(items)))
        )
    return items[0]


def _tables(items: list[Any], path: str) -> list[dict[str, Any]]:
    if not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{path!r} is a list of values; set it as a whole: --set '{path}=[...]'")
    return items


def _entry(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the entry of an array that has this name, this ``use`` or this position from 0."""
    named = [item for item in items if (item.get("name") or item.get("use")) == name]
    found = named or [item for item in items if item.get("use") == name]
    if name.isdecimal() and int(name) < len(items):
        found = [items[int(name)]]
    if len(found) == 1:
        return found[0]
    what = "there is no" if not found else f"there are {len(found)} entries called"
    there = [str(item.get("name") or item.get("use")) for item in items]
    choice = f"use a name, or the position from 0 (it holds: {', '.join(there) or 'nothing'})"
    raise ConfigError(
        f"{what} {name!r} in that list; {did_you_mean(name, there, otherwise=choice) if not found else choice}"
    )


def _value(text: str) -> Any:
    try:
        # The syntax of the file, so a setting means the same in both; anything else is a text.
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_OF_AGL = ("debug", "no_plugins")
_FLAGS = ("quiet", "as_json", "has_console")
_NAMES = {"as_json": "--json", "has_console": "--console"}


def run_again(file: Path, settings: tuple[str, ...], *flags: str, verb: str = "run") -> str:
    """Return ``agl run FILE``, or another verb, with the command's own flags and ``--set`` options, and ``flags``."""
    context = click.get_current_context()
    # The proposed command repeats the person's own options, so that it can be pasted.
    before = _given(context.find_root(), _OF_AGL)
    overrides = [word for setting in settings for word in ("--set", setting)]
    return command(*before, verb, str(file), *overrides, *_given(context, _FLAGS), *flags)


def _given(context: click.Context, names: tuple[str, ...]) -> list[str]:
    return [_NAMES.get(name, f"--{name.replace('_', '-')}") for name in names if context.params.get(name)]
