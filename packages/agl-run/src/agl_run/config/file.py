"""Reads an experiment file: turns TOML into the records of :mod:`agl_run.config.sections`.

Unknown keys are refused before anything runs; the message suggests a similar key.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import msgspec

from agl.errors import ConfigError
from agl.hints import check_value, did_you_mean, shown
from agl.schemas import Record
from agl_run.config.sections import EXAMPLES, ExperimentConfig, PolicyConfig

ONE_OR_SEVERAL = ("tunes", "source", "first")
"""Keys that accept one name or an array of names; the records always hold a tuple."""

_POLICY_KEYS = ("use", "aliases", "agents", "label", "sampling")


def load_config(path: Path) -> ExperimentConfig:
    """Read an experiment file; raises :class:`ConfigError`, which names the file, the key and the remedy."""
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
        raise ConfigError(f"{path} is not valid TOML: {error}{_line_of(path, str(error))}") from None


def _line_of(path: Path, problem: str) -> str:
    """Quote the line of the file that a TOML error names, and say how to correct it."""
    number = re.search(r"line (\d+)", problem)
    lines = path.read_text(encoding="utf-8").splitlines()
    line = lines[int(number[1]) - 1].strip() if number and int(number[1]) <= len(lines) else ""
    remedy = 'text goes in quotes, as in name = "value", and true and false are lower case'
    if "Cannot declare" in problem:
        remedy = "join the two sections of that name into one"
    return f": {line[:80]}; {remedy}" if line else "; correct that line"


def parse_config(data: dict[str, Any], *, source: str = "the experiment") -> ExperimentConfig:
    """Build an experiment's configuration from plain data with the structure of the TOML file.

    Args:
        data: The sections by name.
        source: The data's origin, for messages.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type; the message names the key and suggests a similar
            one.
    """
    # One name may be written without brackets; the records know lists only.
    shaped: dict[str, Any] = {key: _with_lists(section) for key, section in data.items()}
    if isinstance(shaped.get("learn"), dict):
        shaped["learn"] = {name: _with_lists(table) for name, table in shaped["learn"].items()}
    try:
        # Checked by hand before msgspec converts: its messages name a path, ours also say what to
        # write.
        check_shape(shaped, ExperimentConfig)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    # After the check, because a policy's own arguments have no declared type.
    shaped["policy"] = {name: _shape_policy(section) for name, section in shaped.get("policy", {}).items()}
    return msgspec.convert(shaped, ExperimentConfig)


def _with_lists(section: Any) -> Any:
    """Replace a single name under a key of ``ONE_OR_SEVERAL`` by a list, in a section or an array of sections."""
    if isinstance(section, list):
        return [_with_lists(item) for item in cast("list[Any]", section)]
    if not isinstance(section, dict):
        return section
    table = cast("dict[str, Any]", section)
    return {key: [value] if key in ONE_OR_SEVERAL and isinstance(value, str) else value for key, value in table.items()}


def _shape_policy(table: dict[str, Any]) -> dict[str, Any]:
    """Move a policy's own arguments, which stand next to its settings in a file, into the table ``params``."""
    own = {key: table[key] for key in _POLICY_KEYS if key in table}
    rest = {key: value for key, value in table.items() if key not in own and key != "params"}
    return {**own, "params": {**rest, **table.get("params", {})}}


_RENAMED = {"n_workers": "runner.concurrency", "n_runners": "runner.concurrency"}
"""Maps parameter names of Python or of other tools to the file's key for the same setting."""

_FILLED = {"policy": 'use = "openai" and model = {}', "resource": "template = {}", "experiment": "agent = {}"}
"""Maps a section to what to write if a plain text stands in its place; for other sections this is ``use``."""


def check_shape(data: Mapping[str, Any], record: type[Record], *, path: str = "") -> None:
    """Check the keys and values of a section and of its nested sections.

    Args:
        data: The section.
        record: The record into which the section is converted.
        path: The section's path as in ``--set``; empty for a whole experiment.

    Raises:
        ConfigError: A key is unknown or missing, or a value has another type.
    """
    hints = get_type_hints(record, include_extras=True)
    for key, value in data.items():
        where = f"{path}.{key}" if path else key
        if key in hints:
            _check_value(value, hints[key], where)
        elif record is not PolicyConfig:  # whose other keys are arguments of the policy
            raise ConfigError(f"unknown key {where!r}; {_hint(where, key, value, data, list(hints))}")
    for field in msgspec.structs.fields(record):
        if field.required and field.name not in data:
            raise ConfigError(_lacking(field.name, path))


def _check_value(value: Any, hint: Any, where: str) -> None:
    record = _record_of(hint)
    if record is None:
        check_value(value, hint, where, advice=EXAMPLES.get(where.rpartition(".")[2], ""))
    elif value is None and type(None) in get_args(hint):
        return
    else:
        for place, item in _sections(value, hint, where):
            if not isinstance(item, dict):
                raise ConfigError(_no_section(item, hint, place, record))
            check_shape(cast("dict[str, Any]", item), record, path=place)


def _sections(value: Any, hint: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield each section that the value of a key holds, as ``(path, section)``."""
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        yield from ((f"{where}.{number}" if len(items) > 1 else where, item) for number, item in enumerate(items))
    elif origin is dict and isinstance(value, dict):
        yield from ((f"{where}.{name}", item) for name, item in cast("dict[str, Any]", value).items())
    elif origin in (tuple, dict):
        yield where, None if isinstance(value, dict) else value
    else:
        yield where, value


def _record_of(hint: Any) -> type[Record] | None:
    """Return the record type of a key whose value is a section or holds sections; ``None`` for a plain value."""
    # Sections stand alone, in a tuple, as values of a dict, or are optional.
    kinds = get_args(hint) or (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Record)), None)


def _no_section(item: Any, hint: Any, where: str, record: type[Record]) -> str:
    """Return the error text for a plain value in the place of a section."""
    key = where.partition(".")[0]
    origin = get_origin(hint)
    if origin is dict and isinstance(item, list):
        return f"[[{key}]] is a list, and every {key} has a name: write [{key}.NAME], such as [{key}.main]"
    if origin is dict and where.rpartition(".")[2] in record.__struct_fields__:
        return f"{where} is {shown(item)}, and every {key} has a name: write [{key}.NAME], such as [{key}.main]"
    if origin is tuple and item is None:
        return f"[{key}] may stand several times in a file: write [[{key}]] with two brackets"
    if isinstance(item, list) and "." not in where:
        return f"[[{where}]] stands once in a file: write [{where}] with one bracket"
    section = f"[[{where}]]" if origin is tuple else f"[{where}]"
    use = f" with {_FILLED.get(key, 'use = {}').format(shown(item))}" if isinstance(item, str) else ""
    if "." in where and origin is not dict:
        name = where.rpartition(".")[2]
        inside = shown(item) if use else '"NAME"'
        return f"{where} is {shown(item)}; write a table: {name} = {{ use = {inside} }}"
    return f"{where} is {shown(item)}; write a section {section}{use}"


def _hint(where: str, key: str, value: Any, data: Mapping[str, Any], known: list[str]) -> str:
    """Return advice for an unknown key: a similar key, its name in the file, or its section."""
    # A misspelt key is likelier than one in the wrong section.
    near, home = did_you_mean(key, known), _home(key)
    if near:
        return near
    if key in _RENAMED:
        return f"it is {_RENAMED[key]} in a file"
    if home:
        return home
    listed = f"remove it, or use one of: {', '.join(sorted(known))}"
    if "params" not in known:
        return listed
    owner = data.get("use") or f"the {where.partition('.')[0]}"
    return (
        f"if {key} is an argument of {owner}, put it under params: params = {{ {key} = {shown(value)} }}; else {listed}"
    )


def _home(key: str) -> str:
    """Say where a misplaced key belongs; return ``""`` if no section has this key."""
    for name, hint in get_type_hints(ExperimentConfig).items():
        record = _record_of(hint)
        if key == name and record is None:
            return f"write {key} at the top of the file, above the first section"
        if record is not None and get_origin(hint) is None and key in record.__struct_fields__:
            return f"it is a key of [{name}], so write it there; with --set it is {name}.{key}"
    return ""


def _lacking(name: str, path: str) -> str:
    if not path:
        return f'there is no section [{name}]; begin the file with [{name}] and, below it, agent = "agent:solve"'
    if path.startswith("policy."):
        return f'[{path}] lacks {name}; write {name} = "openai", "torch" or the name of another policy'
    return f"{path} lacks {name}; {EXAMPLES.get(name, f'write {name} = ...')}"
