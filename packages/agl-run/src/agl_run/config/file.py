"""Reads an experiment file: turns TOML into the records of :mod:`agl_run.config.records`.

Unknown keys are refused before anything runs, with a close match.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_run.config.records import ExperimentConfig
from agl_run.config.shape import check_shape

ONE_OR_SEVERAL = ("tunes", "source", "first")
"""Keys that take one name or an array of names; the records always hold several."""

_POLICY_KEYS = ("use", "aliases", "agents", "label", "sampling")


def load_config(path: Path) -> ExperimentConfig:
    """Read an experiment file; raises :class:`ConfigError` that names file, key and remedy."""
    return parse_config(load_data(path), source=str(path))


def load_data(path: Path) -> dict[str, Any]:
    """Read a TOML file as plain data; raises :class:`ConfigError` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, there, otherwise=f"there is {', '.join(there)}" if there else "")
        raise ConfigError(f"no experiment file {str(path)!r}{f'; {hint}' if hint else ''}") from None
    except IsADirectoryError:
        inside = path / "experiment.toml"
        hint = f", such as {inside}" if inside.is_file() else ""
        raise ConfigError(f"{str(path)!r} is a directory; name the experiment file in it{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}; name an experiment file, such as e.toml") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}{_line_of(path, str(error))}") from None


def _line_of(path: Path, problem: str) -> str:
    """Quote the line that an error names, with the usual remedies for a wrong value."""
    number = re.search(r"line (\d+)", problem)
    lines = path.read_text(encoding="utf-8").splitlines()
    line = lines[int(number[1]) - 1].strip() if number and int(number[1]) <= len(lines) else ""
    remedy = 'text goes in quotes, as in name = "value", and true and false are lower case'
    if "Cannot declare" in problem:
        remedy = "join the two sections of that name into one"
    return f": {line[:80]}; {remedy}" if line else "; correct that line"


def parse_config(data: dict[str, Any], *, source: str = "the experiment") -> ExperimentConfig:
    """Build an experiment from plain data, as in the TOML file.

    Args:
        data: The sections by name.
        source: Name of the data's origin, for messages.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type; names the key and the close match.
    """
    shaped: dict[str, Any] = {key: _with_lists(section) for key, section in data.items()}
    try:
        check_shape(shaped, ExperimentConfig)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    shaped["policy"] = {name: _shape_policy(section) for name, section in shaped.get("policy", {}).items()}
    return msgspec.convert(shaped, ExperimentConfig)


def _with_lists(section: Any) -> Any:
    """Turn single names into lists where the record holds several; takes a section or an array of them."""
    if isinstance(section, list):
        return [_with_lists(item) for item in cast("list[Any]", section)]
    if not isinstance(section, dict):
        return section
    table = cast("dict[str, Any]", section)
    return {key: [value] if key in ONE_OR_SEVERAL and isinstance(value, str) else value for key, value in table.items()}


def _shape_policy(table: dict[str, Any]) -> dict[str, Any]:
    """Put the arguments of a policy, which stand beside its settings, under ``params``."""
    own = {key: table[key] for key in _POLICY_KEYS if key in table}
    rest = {key: value for key, value in table.items() if key not in own and key != "params"}
    return {**own, "params": {**rest, **table.get("params", {})}}
