"""Finds an environment by its name, and loads it according to the generation of verifiers that it was written for.

An environment is an installed package, or a module next to the experiment file.
"""

import atexit
import importlib
import importlib.util
import inspect
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from agl.errors import AglError, ConfigError
from agl.hints import did_you_mean
from agl.schemas import Json
from agl_environments.verifiers.classic import ClassicEnvironment
from agl_environments.verifiers.taskset import TasksetEnvironment

_SHIPPED = ("verifiers.v1.tasksets", "verifiers.v1.envs")


def load(name: str, args: Mapping[str, Json], *, folder: str = "") -> ClassicEnvironment | TasksetEnvironment:
    """Load an environment.

    Args:
        name: The name in verifiers' form: ``wordle``, ``my-env``, or ``owner/my-env@1.0``.
        args: Arguments of the environment's ``load_environment``, or the configuration of its taskset and agents.
        folder: A folder to put first on ``sys.path``; ``""`` for none.

    Raises:
        ConfigError: The environment is not installed, cannot be imported, or refuses the arguments.
    """
    path = locate(name, folder=folder)
    with own_handlers():
        module = _import(name, path)
        load_environment = getattr(module, "load_environment", None)
        if callable(load_environment):
            _check_arguments(name, load_environment, args)
            return ClassicEnvironment(name, _made(name, load_environment, args))
        return TasksetEnvironment(name, args)


def locate(name: str, *, folder: str = "") -> str:
    """Return the module of an environment, without importing it.

    Raises:
        ConfigError: The module does not exist.
    """
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    if not module.isidentifier():
        raise ConfigError(
            f'the environment {name!r} is not the name of a package; write agent = "verifiers:NAME", such as '
            '"verifiers:wordle"'
        )
    for path in (f"{_SHIPPED[0]}.{module}", f"{_SHIPPED[1]}.{module}", module):
        if _exists(path):
            return path
    raise ConfigError(
        f"no environment {name!r} is installed: there is no module {module!r} in {folder or Path.cwd()} or among the "
        f"packages of {sys.executable}. Install its package there: pip install {name.rpartition('/')[2]}, or, from the "
        f"Environments Hub, prime env install {name if '/' in name else 'OWNER/' + name}"
    )


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def own_handlers() -> Generator[None]:
    """Keep environments from handling SIGINT and SIGTERM, and from registering functions to run when Python exits.

    Classic environments do both when they are created. Here the experiment handles the signals, and the runner releases
    the environment.
    """
    register: Callable[..., Any] = atexit.register

    def registered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_theirs = getattr(function, "__module__", "").partition(".")[0] == "verifiers"
        return function if is_theirs else register(function, *args, **kwargs)

    def ignored(number: int, _: object) -> Any:
        return signal.getsignal(number)

    with mock.patch("signal.signal", ignored), mock.patch("atexit.register", registered):
        yield


def _import(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the environment {name!r} needs the missing module {error.name!r}; install it into this environment of "
            f"packages: {sys.executable} -m pip install {(error.name or '').partition('.')[0]}"
        ) from error
    except (Exception, SystemExit) as error:  # any error of the environment's module
        raise ConfigError(f"the environment {name!r} cannot be imported: {_described(error)}") from error


def _described(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, AttributeError) and "module 'verifiers' has no attribute" in str(error):
        return f"{text}. It was written for an older verifiers: pip install 'verifiers<0.4'"
    return text


def _made(name: str, function: Callable[..., Any], args: Mapping[str, Json]) -> Any:
    try:
        return function(**args)
    except AglError:
        raise
    except (Exception, SystemExit) as error:  # any error of the environment's own function
        given = f" with {', '.join(args)} of agent_args" if args else ""
        raise ConfigError(f"the environment {name!r} could not be loaded{given}: {_described(error)}") from error


def _check_arguments(name: str, function: Callable[..., Any], args: Mapping[str, Json]) -> None:
    parameters = inspect.signature(function).parameters
    named = [key for key, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for key in args:
        if key not in parameters:
            hint = did_you_mean(key, named, otherwise=f"it takes {', '.join(named) or 'none'}")
            raise ConfigError(f"the environment {name!r} has no argument {key!r} (in experiment.agent_args); {hint}")
