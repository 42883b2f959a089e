"""The table of coding harnesses: each entry states how a harness is installed, pointed at a model, and given a task.

``harnesses.toml`` in this package holds the built-in entries. Users can write entries in the same form in other files.
This module does not start programs.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any, Literal

import msgspec

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record

MAX_ARGUMENT = 128 * 1024 - 1
"""Largest size of one program argument on Linux, in bytes."""

_PLACEHOLDERS = (
    "$base_url, $url, $key, $model, $context, $output, $prompt, $home, $workspace, $folder and, as an argument of its "
    "own, $arguments"
)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

SITUATIONS = ("one turn", "tool", "parallel tools", "sub-agent", "compaction", "429 and retry", "stream cut", "resume")
"""The situations in which a harness is tested with a scripted model."""


class Checked(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of the latest test of a harness.

    Attributes:
        version: The tested version.
        on: The day of the test, such as ``2026-11-23``.
        passed: The :data:`SITUATIONS` in which the harness worked.
        note: A remark for users.
    """

    version: str
    on: str
    passed: tuple[str, ...] = ()
    note: str = ""


class Harness(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A coding harness: a program that works in a folder by calling a model.

    Attributes:
        name: The harness's name in experiments and commands.
        title: The harness's name for people.
        command: The program and its arguments, with placeholders; an experiment's own arguments replace
            ``$arguments``.
        prompt: How the harness gets the task: as an ``argument`` with ``$prompt``, or on ``stdin``.
        dialect: The dialect of its model calls: ``chat``, ``responses``, ``messages`` or ``google``.
        npm: The npm package and its version, such as ``name@1.2.3``; ``""`` if it is not on npm.
        pip: Requirements from PyPI, starting with the harness's own package, such as ``name==1.2.3``.
        python: The Python release that the requirements in ``pip`` need, such as ``3.12``; ``""`` for the running one.
        environment: Environment variables, whose values may have placeholders.
        files: Files for the harness's home folder, by relative path. They may have placeholders, whose values are
            escaped for double-quoted strings of JSON and TOML.
        version: Arguments with which the program prints its version.
        checked: The latest test of the harness; ``None`` if it was never tested.
        folder: The folder of the user's file with this entry; ``""`` for a built-in entry.
    """

    name: str
    command: tuple[str, ...]
    title: str = ""
    prompt: Literal["argument", "stdin"] = "argument"
    dialect: Literal["chat", "responses", "messages", "google"] = "chat"
    npm: str = ""
    pip: tuple[str, ...] = ()
    python: str = ""
    environment: dict[str, str] = {}
    files: dict[str, str] = {}
    version: tuple[str, ...] = ("--version",)
    checked: Checked | None = None
    folder: str = ""

    @property
    def label(self) -> str:
        """The harness's name in messages: the title, or else the name."""
        return self.title or self.name

    @property
    def pin(self) -> str:
        """The version that the entry names; ``""`` if it names none."""
        if self.npm:
            return self.npm.rpartition("@")[2] if "@" in self.npm[1:] else ""
        return self.pip[0].partition("==")[2] if self.pip else ""

    @property
    def program(self) -> str:
        """The name or path of the harness's program."""
        return self.command[0].replace("$folder", self.folder)


class Launch(Record, frozen=True, kw_only=True):
    """A harness's command, with all placeholders filled.

    Attributes:
        words: The program and its arguments.
        environment: Environment variables to set.
        files: Contents of the files in the harness's home folder, by relative path.
        stdin: Bytes for the program's standard input.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    stdin: bytes


class Model(Record, frozen=True, kw_only=True):
    """The model that a harness calls.

    Attributes:
        base_url: The address of the model's API, ending in ``/v1``.
        key: The API key.
        name: The model's name in requests.
        context: Context length for the harness's own settings: the most tokens of a prompt and its answer together.
        output: Answer length for the harness's own settings: the most tokens of one answer.
    """

    base_url: str
    key: str
    name: str
    context: int = 128_000
    output: int = 8_192


def load_table() -> dict[str, Harness]:
    """Return the built-in harnesses by name, in the order of ``harnesses.toml``."""
    source = files("agl_harness") / "harnesses.toml"
    return _parse(source.read_text(encoding="utf-8"), source="the table of harnesses", folder="")


def load_file(path: Path) -> dict[str, Harness]:
    """Return the harnesses of a TOML file by name.

    Raises:
        ConfigError: The file cannot be read, or an entry is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the harness file {str(path)!r} cannot be read: {error}; name a TOML file with a section for the harness"
        ) from None
    return _parse(text, source=str(path), folder=str(path.resolve().parent))


def find(name: str, *, folder: Path) -> Harness:
    """Find a harness by name, or in a file: ``mine.toml``, or ``mine.toml#NAME`` if the file holds several.

    Args:
        name: The name of the harness or of the file.
        folder: The folder to which a relative file name refers.

    Raises:
        ConfigError: The harness or the file does not exist, or the file is invalid.
    """
    file, _, section = name.partition("#")
    if file.endswith(".toml"):
        return _in_file(load_file(folder / file), section, name=name)
    table = load_table()
    if name not in table:
        hint = did_you_mean(name, table, otherwise=f"there are {', '.join(table)}.")
        raise ConfigError(
            f"there is no harness {name!r}; {hint} For one of your own, describe it in a TOML file and name that "
            'file, as in harness = "mine.toml"'
        )
    return table[name]


def _in_file(table: Mapping[str, Harness], section: str, *, name: str) -> Harness:
    if section in table:
        return table[section]
    if not section and len(table) == 1:
        return next(iter(table.values()))
    wanted = f"has no harness {section!r}" if section else f"holds {len(table)} harnesses"
    remedy = f"name one of them, as in {name.partition('#')[0]}#{next(iter(table))}" if table else "add a section"
    raise ConfigError(f"the harness file {name.partition('#')[0]!r} {wanted}; {remedy}")


def own_files(harness: Harness) -> list[Path]:
    """Return the files and folders next to a user's own entry that the entry's command names with ``$folder``."""
    words = [PurePosixPath(word) for word in harness.command if word.startswith("$folder/")]
    return [Path(harness.folder, *word.parts[1:2]) for word in words]


def fill(
    harness: Harness, *, model: Model, prompt: str, home: Path, workspace: Path, arguments: Sequence[str] = ()
) -> Launch:
    """Fill the placeholders of a harness's entry.

    Args:
        harness: The entry.
        model: The model that the harness calls.
        prompt: The prompt for the task.
        home: The harness's home folder.
        workspace: The folder in which the harness works.
        arguments: Further arguments from the experiment.

    Raises:
        ConfigError: The prompt is too long for an argument or has a null character, or the command has no place for
            ``arguments``.
    """
    _check_prompt(harness, prompt)
    values: dict[str, str] = {
        "base_url": model.base_url,
        "url": model.base_url.removesuffix("/v1"),
        "key": model.key,
        "model": model.name,
        "context": str(model.context),
        "output": str(model.output),
        "home": str(home),
        "workspace": str(workspace),
        "folder": harness.folder,
        "prompt": prompt,
    }
    escaped = {key: json.dumps(value, ensure_ascii=False)[1:-1] for key, value in values.items()}
    return Launch(
        words=tuple(Template(word).substitute(values) for word in _with_arguments(harness, arguments)),
        environment={key: Template(text).substitute(values) for key, text in harness.environment.items()},
        files={path: Template(text).substitute(escaped) for path, text in harness.files.items()},
        stdin=prompt.encode() if harness.prompt == "stdin" else b"",
    )


def _check_prompt(harness: Harness, prompt: str) -> None:
    if "\0" in prompt:
        raise ConfigError("the prompt holds a null character, which no program takes; remove it from the task")
    size = len(prompt.encode())
    if harness.prompt == "argument" and size > MAX_ARGUMENT:
        raise ConfigError(
            f"the prompt has {size:,} bytes, and {harness.label} takes it as an argument, of which the "
            f"system allows {MAX_ARGUMENT:,}; put the long part into a file of the workspace, and name it in the prompt"
        )


def _with_arguments(harness: Harness, arguments: Sequence[str]) -> list[str]:
    """Return the command with the experiment's arguments; dollar signs in the arguments are escaped."""
    words = list(harness.command)
    if "$arguments" not in words:
        if arguments:
            raise ConfigError(
                f"the harness {harness.name!r} takes no further arguments, because its command has no $arguments; put "
                "that into its command in the table"
            )
        return words
    place = words.index("$arguments")
    return [*words[:place], *(argument.replace("$", "$$") for argument in arguments), *words[place + 1 :]]


def _parse(text: str, *, source: str, folder: str) -> dict[str, Harness]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; correct that line") from None
    return {name: _entry(name, section, source=source, folder=folder) for name, section in data.items()}


def _entry(name: str, section: Any, *, source: str, folder: str) -> Harness:
    where = f"{source}: [{name}]"
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: {name} stands above the first section; begin each harness with [its-name]")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a harness's name holds lower-case letters, digits, '.', '_' and '-' only")
    try:
        found = msgspec.convert({**section, "name": name, "folder": folder}, Harness)
    except msgspec.ValidationError as error:
        known = ", ".join(sorted(set(Harness.__struct_fields__) - {"name", "folder"}))
        raise ConfigError(f"{where}: {error}; the keys of a harness are {known}") from None
    _check_entry(found, where)
    return found


_SAMPLE = Model(base_url="http://host/v1", key="key", name="model")


def _check_entry(harness: Harness, where: str) -> None:
    """Raise ConfigError for an entry with an unknown placeholder, no prompt, or a file outside of the home folder."""
    if not harness.command:
        raise ConfigError(f'{where}: command is empty; write the program and its arguments, as in ["node", "agent.js"]')
    if harness.prompt == "argument" and not any("$prompt" in word for word in harness.command):
        raise ConfigError(
            f'{where}: no argument of the command holds $prompt; add one, or write prompt = "stdin" if it reads its '
            "task from standard input"
        )
    for path in harness.files:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ConfigError(f"{where}: the file {path!r} is not within the home folder; write a relative path")
    try:
        fill(harness, model=_SAMPLE, prompt="", home=Path("/home"), workspace=Path("/workspace"))
    except KeyError as error:
        raise ConfigError(f"{where}: there is no placeholder ${error.args[0]}; there are {_PLACEHOLDERS}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; write $$ for a dollar sign") from None
