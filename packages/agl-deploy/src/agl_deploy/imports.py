"""Finds the modules of an agent, and the distributions that they import, without running any code."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from agl.errors import ConfigError
from agl.schemas import Record

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Imported(Record, frozen=True, kw_only=True):
    """The modules of an agent, and their requirements.

    Attributes:
        files: Files of the modules in the experiment's folder, relative to the folder.
        distributions: Distributions that these files import, and those in the folder's ``requirements.txt``.
        unknown: Imported modules that are neither in the folder nor installed, as pairs of module and importing file.
    """

    files: tuple[str, ...]
    distributions: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]


def read_imports(folder: Path, modules: Iterable[str], programs: Iterable[str] = ()) -> Imported:
    """Follow the imports of modules through a folder.

    Args:
        folder: The experiment's folder.
        modules: Modules of the agent and the rewards, such as ``agent`` or ``pkg.agent``.
        programs: Words of the agent's command; those that are Python files are followed too.

    Raises:
        ConfigError: A file is not valid Python.
    """
    files, outside = dict.fromkeys(name for name in programs if name.endswith(".py")), dict[str, str]()
    for module in modules:
        if not (own := _files_of(folder, module)):
            outside.setdefault(module.partition(".")[0], "the experiment's file")
        files |= dict.fromkeys(own)
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        for module in _modules_in(folder, file):
            own = _files_of(folder, module)
            waiting += [each for each in own if each not in files]
            files |= dict.fromkeys(own)
            if not own:
                outside.setdefault(module.partition(".")[0], file)
    return _sorted_out(folder, list(files), outside)


def _sorted_out(folder: Path, files: list[str], outside: dict[str, str]) -> Imported:
    found, unknown = set(_required(folder)), list[tuple[str, str]]()
    for module, file in outside.items():
        if module in sys.stdlib_module_names or module in ("agl", "__future__"):
            continue
        found |= set(_providers().get(module, ()))
        if module not in _providers():
            unknown.append((module, file))
    return Imported(files=tuple(sorted(files)), distributions=tuple(sorted(found)), unknown=tuple(sorted(unknown)))


@cache
def _providers() -> dict[str, list[str]]:
    """Return the distributions that provide each top-level module, by module."""
    return dict(metadata.packages_distributions())


def _files_of(folder: Path, module: str) -> list[str]:
    """Return the files that importing ``module`` from the folder runs; empty if the module is not in the folder."""
    if not _MODULE.fullmatch(module):
        return []
    parts = module.split(".")
    packages = [Path(*parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
    own = next((parts[:count] for count in range(len(parts), 0, -1) if (folder / _file(parts[:count])).is_file()), None)
    if own is None and not (folder / parts[0]).is_dir():
        return []
    files = [*packages, *([_file(own)] if own else [])]
    return [path.as_posix() for path in files if (folder / path).is_file()]


def _file(parts: list[str]) -> Path:
    return Path(*parts).with_suffix(".py")


def _modules_in(folder: Path, file: str) -> Iterator[str]:
    """Yield the absolute names of modules that a file imports, at any level, including within functions."""
    try:
        tree = ast.parse((folder / file).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} of the agent is not valid Python ({error}); correct it") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}, which the experiment's file names: {error.strerror}; correct its name"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*Path(file).parts[: -node.level], *([node.module] if node.module else [])])
            above = base if node.level else node.module or ""
            yield from ([above] if above else [])
            yield from (f"{above}.{name.name}" if above else name.name for name in node.names if name.name != "*")


def _required(folder: Path) -> Iterator[str]:
    """Yield the requirements in the folder's ``requirements.txt`` that apply to this Python, as name with extras."""
    path = folder / "requirements.txt"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            need = Requirement(line.partition(" #")[0].partition("#")[0].strip())
        except InvalidRequirement:
            continue
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        extras = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
        yield f"{need.name}{extras}"
