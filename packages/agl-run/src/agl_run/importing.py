"""Imports what an experiment names: agents and rewards as ``module:attribute``, and the frameworks of its tracers.

A failure is an error for the author of the module: it names the part that is missing, the file that needs it, and
the next step.
"""

import importlib
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from agl.contracts import Tracer
from agl.errors import ConfigError


def import_attribute(path: str, folder: str = "", *, kind: str = "agent") -> Any:
    """Import ``module:attribute``.

    Args:
        path: The module and the attribute.
        folder: Put first in ``sys.path``; ``""`` for nothing.
        kind: Its part in the experiment, as messages name it.

    Raises:
        ConfigError: The module or the attribute cannot be had; names the missing part and a close match.
    """
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(f"the {kind} {path!r} is not of the form 'module:attribute', such as 'agent:solve'")
    module = _import_module(module_name, folder, kind)
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"module {module_name!r} has no {attribute!r}{hint}") from None


def _import_module(name: str, folder: str, kind: str) -> Any:
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (name + ".").startswith(error.name + "."):
            raise ConfigError(f"the {kind}'s module {name!r} {_needs(error)}") from error
        where = folder or str(Path.cwd())
        raise ConfigError(f"no module {name!r} for the {kind}; looked in {where} and sys.path") from error
    except Exception as error:  # any error of the module is reported as its own
        raise ConfigError(
            f"the {kind}'s module {name!r} raised {type(error).__name__} when it was imported: {error}; "
            "make it importable first, or use --debug to see where it happened"
        ) from error


def install_tracers(tracers: Iterable[tuple[str, Tracer]]) -> None:
    """Install tracers, given with their names; raises :class:`ConfigError` where a framework is missing."""
    for name, tracer in tracers:
        try:
            tracer.install()
        except ModuleNotFoundError as error:
            raise ConfigError(f"the tracer {name!r} {_needs(error)}, or remove {name!r} from tracers") from error


def _needs(error: ModuleNotFoundError) -> str:
    """Name the missing module, the file and the line that import it, and the next step."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen importlib"))
    return (
        f"needs the missing module {error.name!r}, which {frame.filename}:{frame.lineno} imports; install it into "
        "this environment"
    )
