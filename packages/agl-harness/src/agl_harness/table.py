"""The table of coding harnesses: one entry says how a harness is installed, pointed at a model, and given a task.

``harnesses.toml`` in this package holds ours. A person's own entry is a section of the same form in a file of their
own, and counts as much. Nothing here starts a program.
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
"""Bytes that Linux takes as one argument of a program."""

_PLACEHOLDERS = (
    "$base_url, $url, $key, $model, $context, $output, $prompt, $home, $workspace, $folder and, as an argument of its "
    "own, $arguments"
)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

SITUATIONS = ("one turn", "tool", "parallel tools", "sub-agent", "compaction", "429 and retry", "stream cut", "resume")
"""The situations in which a harness is tried against a scripted model."""


class Checked(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last time that a harness was tried.

    Attributes:
        version: The version that was tried.
        on: Day, as ``2026-11-23``.
        passed: The :data:`SITUATIONS` that it mastered.
        note: A remark for users.
    """

    version: str
    on: str
    passed: tuple[str, ...] = ()
    note: str = ""


class Harness(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A coding harness: a program that works in a folder by calling a model.

    Attributes:
        name: Its name in experiments and commands.
        title: Its name for people.
        command: The program and its arguments, with placeholders; an experiment's own arguments come in the place of
            ``$arguments``.
        prompt: How the task is given: as an ``argument`` that holds ``$prompt``, or on ``stdin``.
        dialect: The API that it speaks: ``chat``, ``responses``, ``messages`` or ``google``.
        npm: Package and version, as ``name@1.2.3``; ``""`` for none.
        pip: Requirements, the harness's own first, as ``name==1.2.3``.
        python: Python that its packages need, such as ``3.12``; ``""`` for this one.
        environment: Variables with placeholders.
        files: Files in its home folder, by relative path, with placeholders, whose values are escaped for JSON and for
            TOML's strings in double quotes.
        version: Arguments that make it print its version.
        checked: The last time that it was tried.
        folder: The folder of the file that it comes from.
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
        """Its name in messages."""
        return self.title or self.name

    @property
    def pin(self) -> str:
        """The version that the table names, ``""`` if it names none."""
        if self.npm:
            return self.npm.rpartition("@")[2] if "@" in self.npm[1:] else ""
        return self.pip[0].partition("==")[2] if self.pip else ""

    @property
    def program(self) -> str:
        """The program's name or path."""
        return self.command[0].replace("$folder", self.folder)


class Launch(Record, frozen=True, kw_only=True):
    """A harness ready to be started.

    Attributes:
        words: The program and its arguments.
        environment: Variables to set.
        files: Contents of files in its home folder, by relative path.
        stdin: Bytes for its standard input.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    stdin: bytes


class Model(Record, frozen=True, kw_only=True):
    """The model that a harness is pointed at.

    Attributes:
        base_url: Its address with ``/v1``.
        key: Its key.
        name: The name under which it is asked for.
        context: Most tokens of a prompt with its answer, for the harness's own settings.
        output: Most tokens of an answer, for the same purpose.
    """

    base_url: str
    key: str
    name: str
    context: int = 128_000
    output: int = 8_192


def load_table() -> dict[str, Harness]:
    """Return the harnesses of this package by name, in the order of its file."""
    source = files("agl_harness") / "harnesses.toml"
    return _parse(source.read_text(encoding="utf-8"), source="the table of harnesses", folder="")


def load_file(path: Path) -> dict[str, Harness]:
    """Return the harnesses of a TOML file by name.

    Raises:
        ConfigError: It cannot be read, or an entry is wrong; names the section and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the harness file {str(path)!r} cannot be read: {error}; name a TOML file with a section for the harness"
        ) from None
    return _parse(text, source=str(path), folder=str(path.resolve().parent))


def find(name: str, *, folder: Path) -> Harness:
    """Return the harness of a name, or that of a file: ``mine.toml``, or ``mine.toml#NAME`` where it holds several.

    Args:
        name: The name or the file.
        folder: Base of a relative file.

    Raises:
        ConfigError: It does not exist; names the close match.
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
    """Return the files and folders next to a person's own entry that its command names with ``$folder``."""
    words = [PurePosixPath(word) for word in harness.command if word.startswith("$folder/")]
    return [Path(harness.folder, *word.parts[1:2]) for word in words]


def fill(
    harness: Harness, *, model: Model, prompt: str, home: Path, workspace: Path, arguments: Sequence[str] = ()
) -> Launch:
    """Fill the placeholders of an entry.

    Args:
        harness: The entry.
        model: The model.
        prompt: The task.
        home: The harness's home folder.
        workspace: The folder that it works in.
        arguments: Further arguments of the experiment.

    Raises:
        ConfigError: The prompt does not fit into an argument, or holds a null character.
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
    """Put the experiment's arguments, in which a dollar sign stands for itself, into the command."""
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
    """Refuse an entry that could not be started: an unknown placeholder, no prompt, a file outside of the home."""
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
