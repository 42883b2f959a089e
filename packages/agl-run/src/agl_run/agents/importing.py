"""Imports the agents and rewards that an experiment names as ``module:attribute``, and installs its tracers.

Errors name the missing module or attribute, the file that needs it, and the next step.
"""

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from agl import PluginManager
from agl.contracts import Tracer
from agl.errors import AglError, ConfigError
from agl.hints import did_you_mean


class OtherModuleError(ConfigError):
    """This process has already imported a different module of the same name."""


def import_attribute(path: str, folder: str = "", *, kind: str = "agent") -> Any:
    """Import ``module:attribute``.

    Args:
        path: The module and the attribute.
        folder: Put first in ``sys.path``; with ``""`` the path stays as it is.
        kind: The object's role in the experiment, such as ``"agent"``; used in messages.

    Raises:
        ConfigError: The module or the attribute does not exist or cannot be imported; the message names it and a close
            match.
        OtherModuleError: This process has imported a different module of that name from another folder.
    """
    module_name, _, attribute = path.partition(":")
    if not attribute:
        hint = _meant_by(path, folder) or "'module:attribute', such as 'agent:solve'"
        raise ConfigError(f"the {kind} {path!r} names no attribute of a module; write {hint}")
    module = _import_module(module_name, folder, kind)
    if folder:
        _refuse_other_folder(module, _file_of(module_name, folder), kind)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(_no_attribute(module, attribute, kind)) from None


def make_importable(folder: str) -> None:
    """Append a folder to the end of ``sys.path``, where it hides no installed modules, unless it is there already."""
    if folder not in sys.path:
        sys.path.append(folder)


def _meant_by(path: str, folder: str) -> str:
    """Suggest a correct spelling for a path without ``:``, such as ``agent.py``, ``agent`` or ``agent.solve``."""
    words = path.split()
    if len(words) > 1:
        return f"a command as an array of words: {json.dumps(words)}"
    if path.endswith(".py"):
        return repr(".".join(Path(path).with_suffix("").parts) + ":NAME") + ", with a function or class of that file"
    module, _, attribute = path.rpartition(".")
    if module and _file_of(module, folder).is_file():
        return repr(f"{module}:{attribute}")
    return f"'{path}:NAME', with a function or class of {path}.py" if _file_of(path, folder).is_file() else ""


def _file_of(module: str, folder: str) -> Path:
    return Path(folder, *module.split(".")).with_suffix(".py")


def _no_attribute(module: Any, attribute: str, kind: str) -> str:
    """Return the error text for a missing attribute, with a close match or with all names that the module defines."""
    values = cast("dict[str, Any]", vars(module))
    own = [name for name, value in values.items() if getattr(value, "__module__", "") == module.__name__]
    has = f"it has: {', '.join(sorted(own)) or 'no function or class'}"
    hint = did_you_mean(attribute, dir(module), otherwise=has)
    where = Path(getattr(module, "__file__", None) or module.__name__).name
    return f"the {kind}'s module {where} has no {attribute!r}; {hint}"


def _import_module(name: str, folder: str, kind: str) -> Any:
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The agent's module exists, and something that it imports does not.
        if error.name is not None and not (name + ".").startswith(error.name + "."):
            raise ConfigError(f"the {kind}'s module {name!r} {_needs(error)}") from error
        where = folder or str(Path.cwd())
        raise ConfigError(
            f"no module {name!r} for the {kind}; looked in {where} and sys.path; {_other_module(name, Path(where))}"
        ) from error
    except (Exception, SystemExit) as error:  # any error of the module is reported as its own
        problem = f"{type(error).__name__} when it was imported: {error}{_at(error, folder)}"
        raise ConfigError(
            f"the {kind}'s module {name!r} raised {problem}; make it importable first, or use --debug for the traceback"
        ) from error


def _refuse_other_folder(module: Any, own: Path, kind: str) -> None:
    """Refuse ``module`` if it was imported from another folder and its file differs from ``own``."""
    found = Path(getattr(module, "__file__", None) or own)
    # Equal copies are fine: tests and notebooks often load the same file from two folders.
    if own.is_file() and found.is_file() and own.read_bytes() != found.read_bytes():
        raise OtherModuleError(
            f"the module {module.__name__!r} for the {kind} is imported from {found} already, and {own} is another; "
            "a process has one module of a name: run this experiment in another process, or rename its module"
        )


def _other_module(name: str, folder: Path) -> str:
    """Return advice for a module that does not exist, such as the module of the folder with the closest name."""
    if name.endswith(".py"):
        return f"write the module without .py: '{name.removesuffix('.py')}:NAME'"
    there = sorted(path.stem for path in folder.glob("*.py"))
    listed = f"there are {', '.join(there[:8])}" if there else "name a module of that folder, or an installed one"
    return did_you_mean(name, there, otherwise=listed)


def _at(error: BaseException, folder: str) -> str:
    place = "" if isinstance(error, SyntaxError) else place_of(error, folder)  # a syntax error says it itself
    return f" (at {place})" if place else ""


def place_of(error: BaseException, folder: str | Path) -> str:
    """Return the innermost line of the traceback that lies in ``folder``, as ``agent.py:3``; ``""`` if no line does."""
    return place_in("".join(traceback.format_tb(error.__traceback__)), folder)


def place_in(trace: str, folder: str | Path) -> str:
    """Return the last line of a formatted traceback that lies in ``folder``, as ``agent.py:3``; ``""`` if none does."""
    root = str(Path(folder).absolute())
    frames = re.findall(r'^(?: +\| )?  File "(.+)", line (\d+)', trace, re.MULTILINE)
    own = [(file, line) for file, line in frames if file.startswith(root) and "site-packages" not in file]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def load_tracers(names: Sequence[str], manager: PluginManager) -> list[Tracer]:
    """Build and install tracers for this whole process, and set the environment variables that they need."""
    tracers: list[Tracer] = [manager.build(manager.tracer(name)) for name in names]
    for tracer in tracers:
        # Before the agent is imported: frameworks read such variables at import.
        os.environ.update(tracer.worker_env())
    install_tracers(zip(names, tracers, strict=True))
    return tracers


def install_tracers(tracers: Iterable[tuple[str, Tracer]]) -> None:
    """Install tracers, given as ``(name, tracer)``; raises :class:`ConfigError` for one that cannot be installed."""
    for name, tracer in tracers:
        try:
            tracer.install()
        except ModuleNotFoundError as error:
            raise ConfigError(f"the tracer {name!r} {_needs(error)}, or remove {name!r} from tracers") from error
        except AglError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"the tracer {name!r} could not be installed: {type(error).__name__}: {error}, at "
                f"{frame.filename}:{frame.lineno}; correct that, or remove {name!r} from tracers"
            ) from error


def _needs(error: ModuleNotFoundError) -> str:
    """Describe a failed import: the missing module, the file and line that import it, and the next step."""
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame of a person's code; the frames of Python's import machinery are no help.
    frame = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen importlib"))
    return (
        f"needs the missing module {error.name!r}, which {frame.filename}:{frame.lineno} imports; install it into "
        "this environment"
    )
