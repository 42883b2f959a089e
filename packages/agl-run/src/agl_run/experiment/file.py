"""Reads an experiment file: turns TOML into the records of :mod:`agl_run.experiment.config`.

Unknown keys are refused before anything runs, with a close match.
"""

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec

from agl.errors import ConfigError
from agl.schemas import Record
from agl_run.experiment.config import ExperimentConfig, readable

ONE_OR_SEVERAL = ("tunes", "source", "first")
"""Keys that take one name or an array of names; the records always hold several."""

_POLICY_KEYS = ("use", "aliases", "agents", "label")

_GONE = {
    "logger": "metrics are always written to metrics.jsonl in the work directory; remove the section, and for another "
    "place install a plugin that observes agl_step_finished",
}
"""Sections of earlier releases, with their replacements."""


def load_config(path: Path) -> ExperimentConfig:
    """Read an experiment file; raises :class:`ConfigError` that names file, key and remedy."""
    return parse_config(load_data(path), source=str(path))


def load_data(path: Path) -> dict[str, Any]:
    """Read a TOML file as plain data; raises :class:`ConfigError` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(str(p.name) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; there is {', '.join(near)}" if near else ""
        raise ConfigError(f"no experiment file {str(path)!r}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None


def parse_config(data: dict[str, Any], *, source: str = "the experiment") -> ExperimentConfig:
    """Build an experiment from plain data, as in the TOML file.

    Args:
        data: The sections by name.
        source: Name of the data's origin, for messages.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type; names the key and the close match.
    """
    _check_keys(data, ExperimentConfig, path="", source=source)
    shaped: dict[str, Any] = {key: _with_lists(section) for key, section in data.items()}
    shaped["policy"] = {name: _shape_policy(name, p, source) for name, p in data.get("policy", {}).items()}
    try:
        return msgspec.convert(shaped, ExperimentConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {readable(error)}") from None


def _with_lists(section: Any) -> Any:
    """Turn single names into lists where the record holds several; takes a section or an array of them."""
    if isinstance(section, list):
        return [_with_lists(item) for item in cast("list[Any]", section)]
    if not isinstance(section, dict):
        return section
    table = cast("dict[str, Any]", section)
    return {key: [value] if key in ONE_OR_SEVERAL and isinstance(value, str) else value for key, value in table.items()}


def _shape_policy(name: str, section: Any, source: str) -> Any:
    if not isinstance(section, dict):
        raise ConfigError(f'{source}: [policy.{name}] must be a table with use = "torch", "openai" or the like')
    table = cast("dict[str, Any]", section)
    if "use" not in table:
        raise ConfigError(f'{source}: [policy.{name}] lacks `use`; write use = "torch", "openai" or a plugin\'s name')
    own = {key: table[key] for key in _POLICY_KEYS if key in table}
    rest = {key: value for key, value in table.items() if key not in own and key != "params"}
    return {**own, "params": {**rest, **table.get("params", {})}}


def _check_keys(data: Any, record: Any, *, path: str, source: str) -> None:
    """Refuse unknown keys in ``data`` and in the nested records, with the close match."""
    if not isinstance(data, dict) or not isinstance(record, type) or not issubclass(record, Record):
        return
    hints = get_type_hints(record)
    for key, value in cast("dict[str, Any]", data).items():
        where = f"{path}.{key}" if path else key
        if key not in hints:
            raise ConfigError(f"{source}: {_unknown_key(where, key, list(hints))}")
        if record is ExperimentConfig and key == "policy":
            continue
        for inner, name, item in _nested(hints[key], value):
            _check_keys(item, inner, path=f"{where}.{name}" if name else where, source=source)


def _unknown_key(where: str, key: str, known: list[str]) -> str:
    if where in _GONE:
        return f"there is no section [[{where}]]: {_GONE[where]}"
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
    if "params" in known and not near:
        hint += f"; the component's own parameters go below params: params = {{ {key} = ... }}"
    return f"unknown key {where!r}; {hint}"


def _nested(hint: Any, value: Any) -> list[tuple[Any, str, Any]]:
    """List the records below a key as (record, name in a table of tables or ``""``, data)."""
    if isinstance(hint, type):
        return [(hint, "", value)]
    inner = [kind for kind in get_args(hint) if isinstance(kind, type) and issubclass(kind, Record)]
    if not inner or not isinstance(value, dict | list):
        return []
    if isinstance(value, list):
        return [(inner[0], "", item) for item in cast("list[Any]", value)]
    table = cast("dict[str, Any]", value)
    named = table if get_args(hint)[0] is str else {"": table}
    return [(inner[0], name, item) for name, item in named.items()]
