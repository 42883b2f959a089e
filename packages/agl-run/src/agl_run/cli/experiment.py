"""Shared parts of commands that take an experiment file: reads it, overrides keys, makes the trainer."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from agl import PluginManager
from agl.errors import ConfigError
from agl_run.experiment.config import ExperimentConfig
from agl_run.experiment.file import load_config, load_data, parse_config
from agl_run.experiment.progress import Progress
from agl_run.experiment.trainer import Trainer

F = TypeVar("F", bound=Callable[..., Any])


def experiment_argument(function: F) -> F:
    """Add the experiment file and ``--set`` to a command."""
    function = click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key, such as experiment.seed=3."
    )(function)
    return click.argument("file", type=click.Path(path_type=Path))(function)


def make_trainer(
    file: Path, settings: tuple[str, ...], *, manager: PluginManager, progress: Progress | None = None
) -> Trainer:
    """Make the trainer that the file describes; raises :class:`ConfigError`."""
    config, plugins = read_experiment(file, settings, manager=manager)
    return Trainer.from_config(config, folder=file.absolute().parent, plugins=plugins, progress=progress)


def read_experiment(
    file: Path, settings: tuple[str, ...], *, manager: PluginManager
) -> tuple[ExperimentConfig, PluginManager]:
    """Read the file with ``--set`` applied, and load its plugins; raises :class:`ConfigError`."""
    config = load_config(file)
    if settings:
        data = load_data(file)
        for setting in settings:
            _override(data, setting)
        config = parse_config(data, source=f"{file} with --set")
    disabled = config.plugins.get("disabled", ())
    plugins = PluginManager.from_environment(disabled, environ=manager.worker_env()) if disabled else manager
    return config, plugins


def _override(data: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"--set {setting!r} is not of the form KEY=VALUE, such as experiment.seed=3")
    *tables, last = key.strip().split(".")
    table: Any = data
    for name in tables:
        table = _enter(table, name, setting)
    cast("dict[str, Any]", table)[last] = _value(text)


def _enter(table: Any, name: str, setting: str) -> Any:
    if isinstance(table, list):
        items = cast("list[dict[str, Any]]", table)
        named = [item for item in items if (item.get("name") or item.get("use")) == name]
        found = named or [item for item in items if item.get("use") == name]
        if name.isdecimal() and int(name) < len(items):
            found = [items[int(name)]]
        if len(found) == 1:
            return found[0]
        what = "there is no" if not found else f"there are {len(found)} entries called"
        raise ConfigError(f"--set {setting!r}: {what} {name!r} in that list; use a name, or the position from 0")
    return cast("dict[str, Any]", table).setdefault(name, {})


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
