"""The treatment of each of VERL's configuration keys, for every engine.

Every key that a user writes is accounted for: it is used, it asks for what happens anyway, a note names the part of the
experiment that decides it, or it is refused. The reasons are data (`keys.toml`); the list of existing keys is read from
the configuration that VERL ships.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import yaml

from agl.errors import ConfigError
from agl.hints import closest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Engine = Literal["inproc", "fsdp2", "megatron"]
"""Training in this process, or VERL's trainer on Ray with one of VERL's engines."""

MEGATRON_OVERRIDES = ("override_transformer_config", "override_ddp_config", "override_mcore_model_config")
"""Groups of VERL's Megatron engine that take Megatron's own arguments."""

READ_BY_AGL = ("trainer.v1.", "reward.reward_kwargs.")
"""Prefixes of the keys that agl itself reads on a cluster; all other keys go to VERL there."""

Answer = tuple[Literal["used", "holds", "decided", "wrong"], str]
"""The treatment of a key, and the note or reason that the user sees."""


@cache
def key_tables() -> dict[str, Any]:
    """Return the content of `keys.toml`, parsed."""
    return tomllib.loads((resources.files("agl_algo_verl.settings") / "keys.toml").read_text(encoding="utf-8"))


def names_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of all keys in an entry of `keys.toml`."""
    return [group + key for group in [f"{name}." for name in entry.get("below", ())] or [""] for key in entry["keys"]]


def is_for(entry: Mapping[str, Any], engine: Engine) -> bool:
    """Return true if an entry of `keys.toml` applies to an engine."""
    engines = entry.get("engines", (engine,))
    return engine in engines or (engine != "inproc" and "ray" in engines)


@cache
def table(name: Literal["decided", "refused"], engine: Engine) -> dict[str, dict[str, Any]]:
    """Return the entries for an engine in a table of `keys.toml`, by key name."""
    return {key: entry for entry in key_tables()[name] if is_for(entry, engine) for key in names_of(entry)}


def covering(keys: Mapping[str, Any], name: str) -> str:
    """Return the key in `keys` that equals `name`, else the closest group above it; `""` if there is neither."""
    parts = name.split(".")
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in keys), "")


def classify(name: str, value: Any, *, engine: Engine, shape: type[msgspec.Struct]) -> Answer:
    """Return the treatment of a key with this value; `shape` has the keys that agl itself reads."""
    is_own = has(shape, tuple(name.split(".")))
    unusable: str = key_tables()["values"].get(name, {}).get(value if isinstance(value, str) else "", "")
    used: Answer = ("wrong", f"{name} = {value!r}: {unusable}") if unusable else ("used", "")
    if is_own and (engine == "inproc" or name.startswith(READ_BY_AGL)):
        return used
    if engine == "megatron" and not is_verl_key(name, engine) and is_verl_key(name):
        return "wrong", f"{name}: VERL's Megatron engine has no such key"
    refused, decided = table("refused", engine), table("decided", engine)
    if key := covering(refused, name):
        own_name = (engine.replace("inproc", "fsdp2"),) if name.endswith("strategy") else ()
        # A null asks for nothing; VERL's own file has it where a key is not set.
        accepted = [None, *own_name, *(refused[key].get("accepts", ()) if key == name else ())]
        return ("holds", "") if value in accepted else ("wrong", f"{name} = {value!r}: {refused[key]['why']}")
    if key := covering(decided, name):
        return "decided", f"{name} is decided by {decided[key]['by']}"
    if engine != "inproc" and (is_own or is_verl_key(name, engine)):
        return used
    return "wrong", _unknown(name, shape, engine)


def _unknown(name: str, shape: type[msgspec.Struct], engine: Engine) -> str:
    """Return the message about a key that does not exist, or that this engine would ignore."""
    if engine == "inproc" and is_verl_key(name):
        return f"{name}: VERL has this key, and the engine 'inproc' would ignore it; remove it"
    if is_verl_key(name, "megatron"):
        return f'{name}: only VERL\'s Megatron engine reads it; set actor.strategy = "megatron", or remove it'
    near = closest(name, sorted(verl_keys(engine) | set(_paths(shape))), cutoff=0.75)
    return f"{name}: VERL has no such key; " + (f"did you mean {near}?" if near else "remove it")


def read_keys(
    config: Mapping[str, Any], *, engine: Engine, shape: type[msgspec.Struct], wrong: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that are used, by dotted names, and a note for every key that the experiment overrules.

    Raises ConfigError for keys that do not exist, that the engine would ignore, or whose value it cannot follow; one
    message names all of them, after the problems in `wrong`.
    """
    given = {".".join(path): value for path, value in leaves(config)}
    answers = {name: classify(name, value, engine=engine, shape=shape) for name, value in given.items()}
    problems = [*wrong, *(text for kind, text in answers.values() if kind == "wrong")]
    if problems:
        where = "as it is" if engine == "inproc" else 'with engine = "ray"'
        raise ConfigError(f"The VERL configuration cannot be used {where}:\n- " + "\n- ".join(problems))
    notes = [text for kind, text in answers.values() if kind == "decided"]
    return {name: given[name] for name, (kind, _) in answers.items() if kind == "used"}, notes


@cache
def verl_content(engine: Engine = "fsdp2") -> dict[str, Any]:
    """Return the whole configuration that VERL ships, as its file writes it; imports nothing of VERL."""
    spec = find_spec("verl")
    folder = Path(next(iter(spec.submodule_search_locations or ["."]))) if spec else Path()
    name = "ppo_megatron_trainer" if engine == "megatron" else "ppo_trainer"
    file = folder / "trainer" / "config" / f"_generated_{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


@cache
def verl_keys(engine: Engine = "fsdp2") -> frozenset[str]:
    """Return the dotted names of all keys in the configuration that VERL ships, groups included."""
    return frozenset(".".join(path) for path in _every(verl_content(engine), ()) if not path[-1].startswith("_"))


def is_verl_key(name: str, engine: Engine = "fsdp2") -> bool:
    """Return true if VERL has this key with an engine, or accepts any key in the key's group."""
    known = verl_keys(engine)
    # Keys whose value is a mapping with keys of the user's choice.
    ends = ("_kwargs", "override_config", "engine_kwargs.vllm", *MEGATRON_OVERRIDES)
    return name in known or any(name.startswith(f"{key}.") for key in known if key.endswith(ends))


def leaves(config: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of every key of a nested configuration; dots in a name also separate levels."""
    for name, value in config.items():
        path = (*before, *str(name).split("."))
        if isinstance(value, dict) and value:
            yield from leaves(cast("dict[str, Any]", value), path)
        else:
            yield path, value


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration made of keys with dotted names."""
    found: dict[str, Any] = {}
    for name, value in keys.items():
        *groups, last = name.split(".")
        level = found
        for group in groups:
            level = level.setdefault(group, {})
        level[last] = value
    return found


def _every(content: Any, before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key in nested mappings, groups included."""
    if isinstance(content, dict):
        for name, value in cast("dict[Any, Any]", content).items():
            yield (*before, str(name))
            yield from _every(value, (*before, str(name)))


def has(shape: type[msgspec.Struct], path: tuple[str, ...]) -> bool:
    """Return true if a struct has a value, and not a group, at `path`."""
    return ".".join(path) in _paths(shape, is_lowest=True)


@cache
def _paths(shape: type[msgspec.Struct], before: str = "", *, is_lowest: bool = False) -> frozenset[str]:
    """Return the dotted name of every key of a struct and of the structs below it."""
    found: set[str] = set()
    for field in msgspec.structs.fields(shape):
        inner = _struct(field.type)
        if inner is not None:
            found |= _paths(inner, f"{before}{field.name}.", is_lowest=is_lowest)
        if inner is None or not is_lowest:
            found.add(before + field.name)
    return frozenset(found)


def _struct(annotation: object) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None
