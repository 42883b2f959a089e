"""Reads the parts of a Dockerfile that a local sandbox can reproduce: folders, variables, and files to copy.

A local sandbox uses the machine's own programs in place of the image. A line that installs or downloads something is
therefore a *lack*: a sandbox without images cannot carry it out.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from agl.errors import ConfigError
from agl.schemas import Record

_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_HEREDOC = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")
_SILENT = frozenset(
    {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "SHELL", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK", "VOLUME", "ONBUILD"}
)
"""Instructions that change neither the files nor the variables of a command in the container."""


class Copying(Record, frozen=True, kw_only=True):
    """A file or folder that a Dockerfile copies into the image.

    Attributes:
        source: Path relative to the build folder; it may be a pattern.
        target: Absolute path in the image.
        is_folder: True if ``target`` is a folder into which a file is copied under its own name.
    """

    source: str
    target: str
    is_folder: bool


class Image(Record, frozen=True, kw_only=True):
    """The settings of the last stage of a Dockerfile.

    Attributes:
        base: The base image, from ``FROM``.
        workdir: The working directory; ``""`` if the Dockerfile sets none.
        variables: The environment variables, from ``ENV``.
        copies: Files and folders copied from the build folder.
        lacks: Lines that install or download something, unchanged.
        user: The user that commands run as; ``""`` if the Dockerfile sets none.
    """

    base: str = ""
    workdir: str = ""
    variables: dict[str, str] = {}
    copies: list[Copying] = []
    lacks: list[str] = []
    user: str = ""


def read_dockerfile(text: str, *, name: str) -> Image:
    """Read a Dockerfile.

    Args:
        text: The content of the Dockerfile.
        name: The file's name, for messages.

    Raises:
        ConfigError: The first instruction is not ``FROM``, or a line is not a valid instruction.
    """
    stage = _Stage()
    started = False
    for number, line in _lines(text):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word == "FROM":
            stage, started = _Stage(base=_image_of(rest), arguments=stage.arguments), True
        elif word == "ARG" and not started:
            stage.argue(rest)
        elif not started:
            raise ConfigError(f"{name}, line {number}: {line[:60]!r} stands above FROM; begin the file with FROM IMAGE")
        else:
            try:
                stage.follow(word, rest, line)
            except ValueError as error:
                raise ConfigError(f"{name}, line {number}: {line[:80]!r}: {error}; correct that line") from None
    if not started:
        raise ConfigError(f"{name} has no FROM; begin it with FROM IMAGE")
    return stage.image


class _Stage:
    def __init__(self, *, base: str = "", arguments: dict[str, str] | None = None) -> None:
        self.image = Image(base=base)
        self.arguments = dict(arguments or {})

    def argue(self, rest: str) -> None:
        key, _, value = rest.partition("=")
        self.arguments[key.strip()] = self._filled(value.strip().strip("\"'"))

    def follow(self, word: str, rest: str, line: str) -> None:
        """Apply an instruction to the image; raises :class:`ValueError` if it is unknown or incomplete."""
        if word == "WORKDIR":
            folder = _joined(self.image.workdir or "/", self._filled(rest.strip("\"'")))
            self.image = replace(self.image, workdir=folder)
        elif word == "ENV":
            self._set(rest)
        elif word == "ARG":
            self.argue(rest)
        elif word == "USER":
            self.image = replace(self.image, user=self._filled(rest))
        elif word in ("COPY", "ADD"):
            self._copy(word, rest, line)
        elif word == "RUN":
            self.image.lacks.append(line)
        elif word not in _SILENT:
            raise ValueError(f"there is no instruction {word[:20]}")

    def _set(self, rest: str) -> None:
        words = shlex.split(rest)
        if words and "=" not in words[0]:
            key, _, value = rest.partition(" ")
            self.image.variables[key] = self._filled(value.strip())
            return
        for item in words:
            key, _, value = item.partition("=")
            self.image.variables[key] = self._filled(value)

    def _copy(self, word: str, rest: str, line: str) -> None:
        options: list[str] = []
        while rest.startswith("--"):
            option, _, rest = rest.partition(" ")
            options.append(option)
            rest = rest.strip()
        words: list[str] = [str(item) for item in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
        *sources, target = [self._filled(item) for item in words] or [""]
        if not sources:
            raise ValueError("it needs a source and a target")
        is_from_elsewhere = any(option.startswith(("--from", "--parents")) for option in options)
        if is_from_elsewhere or any("://" in item or item.startswith(("<<", "git@")) for item in sources):
            self.image.lacks.append(line)
            return
        if word == "ADD" and any(re.search(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", item) for item in sources):
            self.image.lacks.append(line)  # Docker would unpack the archive
            return
        is_folder = len(sources) > 1 or target.endswith("/") or PurePosixPath(target).name in ("", ".", "..")
        place = _joined(self.image.workdir or "/", target)
        self.image.copies.extend(Copying(source=item, target=place, is_folder=is_folder) for item in sources)

    def _filled(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name is None:
                return "$"
            found = self.image.variables.get(name, self.arguments.get(name, ""))
            if match[3] == "-":
                return found or match[4]
            return (match[4] if found else "") if match[3] == "+" else found

        return _VARIABLE.sub(value, text)


def _image_of(rest: str) -> str:
    words = [word for word in rest.split() if not word.startswith("--")]
    return words[0] if words else ""


def _joined(folder: str, path: str) -> str:
    """Join a path to a folder; resolves ``.`` and ``..``, and never leads above the root."""
    parts: list[str] = []
    for part in PurePosixPath(folder, path).parts[1:]:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the instructions, each with its first line's number; joins continued lines, drops here-documents."""
    lines = enumerate(text.splitlines(), start=1)
    for number, raw in lines:
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\"):
            _, more = next(lines, (0, ""))
            while more.strip().startswith("#"):
                _, more = next(lines, (0, ""))
            line = f"{line[:-1].rstrip()} {more.strip()}"
        if line.split(" ", 1)[0].upper() in ("RUN", "COPY", "ADD"):
            for mark in _HEREDOC.findall(line):
                for _, inner in lines:
                    if inner.strip() == mark:
                        break
        yield number, line


def ignored_names(text: str) -> tuple[str, ...]:
    """Return the patterns of a ``.dockerignore``; a pattern with the prefix ``!`` includes files again."""
    found = (line.strip() for line in text.splitlines())
    return tuple(line for line in found if line and not line.startswith("#"))


def is_ignored(path: PurePosixPath, patterns: tuple[str, ...]) -> bool:
    """Return true if the ``.dockerignore`` patterns leave a path out; the last matching pattern decides."""
    result = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!").strip("/")
        expression = _expression(wanted)
        if any(expression.fullmatch(str(part)) for part in (path, *path.parents)):
            result = not pattern.startswith("!")
    return result


def _expression(pattern: str) -> re.Pattern[str]:
    """Translate a ``.dockerignore`` pattern (Go's ``filepath.Match``, and ``**``) to a regular expression."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    known: Mapping[str, str] = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(known.get(part) or re.escape(part) for part in parts))


def sources_of(copying: Copying, folder: Path) -> list[Path]:
    """Return the files and folders in the build folder that a copy instruction names.

    Raises:
        ConfigError: The source does not exist, or is outside of the build folder.
    """
    relative = _joined("/", copying.source).lstrip("/")
    is_pattern = any(sign in relative for sign in "*?[")
    found = sorted(folder.glob(relative)) if is_pattern else [folder / relative]
    for path in found:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{path} leads out of {folder} by a link; put the file itself there")
    if not found or not all(path.exists() or path.is_symlink() for path in found):
        raise ConfigError(f"the Dockerfile in {folder} copies {copying.source!r}, which does not exist; add it")
    return found
