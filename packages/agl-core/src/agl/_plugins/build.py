"""Builds a component from its entry: imports the factory, checks the parameters against its signature, and calls it.

Each failure raises an error that says who can repair it, and how: a module is not installed, a plugin is broken, or a
parameter does not exist or has the wrong type.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast, get_type_hints

import msgspec

from agl import _entries, contracts
from agl._entries import Entry
from agl._plugins.sources import Source
from agl.errors import AglError, BrokenPluginError, ConfigError, MissingExtraError, PluginError, describe
from agl.hints import check_value, did_you_mean, pip_install, shown

CONTRACTS: Mapping[type[Entry], type] = {
    _entries.AlgorithmEntry: contracts.Algorithm,
    _entries.CreditEntry: contracts.Credit,
    _entries.ExporterEntry: contracts.Exporter,
    _entries.GatewayEntry: contracts.Gateway,
    _entries.ModalityEntry: contracts.Modality,
    _entries.PolicyEntry: contracts.Policy,
    _entries.RedactorEntry: contracts.Redactor,
    _entries.RewardEntry: contracts.RewardEmitter,
    _entries.RunnerEntry: contracts.Runner,
    _entries.StoreEntry: contracts.Store,
    _entries.TracerEntry: contracts.Tracer,
}
"""The contract of a component, by its entry; a sink is an exporter with other methods, and commands are click's."""

# Only values that may have come from a file are converted; an object that a Python program passes
# is taken as it is.
_JSON = (str, bool, int, float, list, dict, type(None))


def resolve(entry: Entry, component: str, source: Source) -> Callable[..., Any]:
    """Import the entry's factory.

    Args:
        entry: The entry.
        component: The component's name in messages, such as ``the reward 'x'``.
        source: The plugin that registered the entry.

    Raises:
        PluginError: A module that the factory needs is not installed; the message has the ``pip install`` line.
        BrokenPluginError: The import raised, or the module has no such attribute.
    """
    if not isinstance(entry.factory, str):
        return entry.factory
    module, _, attribute = entry.factory.partition(":")
    with _blaming(entry.factory, component, source, doing="importing"):
        return _attribute(importlib.import_module(module), attribute)


@contextmanager
def _blaming(factory: str, component: str, source: Source, *, doing: str) -> Generator[None]:
    """Convert what a plugin's code raises into an error that names the plugin and the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _not_installed(error, factory, component, source) from error
    except AglError:
        raise
    # A plugin's code may raise anything, and some scripts call sys.exit where they find no device.
    except (Exception, SystemExit, GeneratorExit) as error:
        raise BrokenPluginError(
            f"{component} cannot be built: {doing} {factory!r} of the plugin {source.shown_name} raised "
            f"{describe(error)}; {source.remedy}"
        ) from error


def build(entry: Entry, component: str, source: Source, params: Mapping[str, Any]) -> Any:
    """Build the component; raises :class:`ConfigError`, which names the wrong parameter and the accepted ones."""
    factory = resolve(entry, component, source)
    checked = checked_params(factory, component, params)
    if inspect.isabstract(factory):  # calling it would raise a TypeError
        check_contract(factory, entry, component, source)
    # What the parts that an experiment brings itself raise is passed on: their callers know better what to say.
    with _blaming(str(entry.factory), component, source, doing="calling") if source.module else nullcontext():
        made = factory(**checked)
    check_contract(made, entry, component, source)
    return made


def check_contract(made: Any, entry: Entry, component: str, source: Source) -> None:
    """Raise :class:`BrokenPluginError` if a component, or its class, lacks a part of its contract."""
    contract = next((contract for kind, contract in CONTRACTS.items() if isinstance(entry, kind)), object)
    if contract is contracts.Exporter and hasattr(made, "begin"):
        contract = contracts.Sink
    if contract is contracts.Runner and hasattr(made, "deploy"):
        contract = object  # a fleet, whose contract is agl_run's
    required = vars(contract)
    names = [name for name in required if name == "__call__" or not name.startswith("_")]
    if isinstance(made, type):
        has = {name for base in made.__mro__ for name in vars(base)}  # not by hasattr: every class can be called
        # Objects may get attributes, and with __getattr__ methods, that their class does not have.
        names = [name for name in names if inspect.isfunction(required[name]) and "__getattr__" not in has]
        has.difference_update(getattr(made, "__abstractmethods__", ()))  # inherited from the contract, and empty
    else:
        has = {name for name in names if hasattr(made, name)}
    lacking = [name for name in names if name not in has]
    if lacking:
        owner, remedy = (f" of the plugin {source.shown_name}", source.remedy) if source.module else ("", "correct it")
        raise BrokenPluginError(
            f"{component}{owner} lacks {', '.join(lacking)}, which its contract in agl.contracts has; {remedy}"
        )


def checked_params(factory: Callable[..., Any], component: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``params`` with JSON values converted to the annotated types of the factory's parameters.

    Raises:
        ConfigError: The factory does not accept a parameter or its value.
    """
    try:
        parameters = inspect.signature(factory).parameters
    # Classes and functions written in C have no signature; they check their arguments themselves.
    except ValueError:  # builtins have no signature
        return dict(params)
    named = {p.name: p for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in params:
        # The most common mistake in an experiment file is a misspelled parameter, so the message
        # names the close one.
        if name not in named and not takes_any:
            home = _home_of(name, list(named), _type_hints(factory)) or _accepted(name, list(named))
            raise ConfigError(f"{component} takes no parameter {name!r}; {home}")
    absent = ", ".join(repr(p.name) for p in named.values() if p.default is p.empty and p.name not in params)
    if absent:
        raise ConfigError(f"{component} needs the parameter {absent}; add it. Its parameters are: {', '.join(named)}")
    # Read once for all parameters, because get_type_hints evaluates annotations that are strings.
    hints = _type_hints(factory)
    defaults = {p.name: p.default for p in named.values()}
    return {
        name: _converted(component, name, value, hints.get(name), defaults.get(name)) for name, value in params.items()
    }


def _record(component: str, path: str, table: dict[str, Any], kind: type[msgspec.Struct], default: Any) -> Any:
    """Convert a table to a record of settings; fields that the table lacks are taken from ``default``."""
    for name in table:
        if name not in kind.__struct_fields__:
            fields = [f"{path}.{field}" for field in kind.__struct_fields__]
            raise ConfigError(
                f"{component} takes no parameter {f'{path}.{name}'!r}; {_accepted(f'{path}.{name}', fields)}"
            )
    hints = get_type_hints(kind, include_extras=True)
    own = {name: getattr(default, name) for name in kind.__struct_fields__} if isinstance(default, kind) else {}
    given = {
        name: _converted(component, f"{path}.{name}", value, hints[name], own.get(name))
        for name, value in table.items()
    }
    try:
        return kind(**{**own, **given})
    except (TypeError, ValueError) as error:  # a field is missing, or two do not go together
        raise ConfigError(f"{component}: {path} is {shown(table)}; correct it: {error}") from error


def _attribute(module: Any, path: str) -> Any:
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, dir(found), otherwise="no other name is similar")
            raise AttributeError(f"no {part!r} in {module.__name__}; {near}")
        found = getattr(found, part)
    return found


def _not_installed(error: ModuleNotFoundError, factory: str, component: str, source: Source) -> AglError:
    name = (error.name or "").partition(".")[0]
    # The plugin's own module is missing: the entry names a module that its distribution does not
    # contain. Any other module is missing from the environment, and pip can install it.
    if not name or name == factory.partition(".")[0].partition(":")[0]:
        return BrokenPluginError(
            f"{component} cannot be built: the plugin {source.shown_name} names {factory!r}, which does not exist "
            f"({describe(error)}); {source.remedy}"
        )
    command = _install_line(name, source)
    kind = MissingExtraError if "[" in command else PluginError
    return kind(f"{component} needs the Python module {name!r}, which is not installed; run: {command}")


def _install_line(module: str, source: Source) -> str:
    """The command that installs a missing module.

    It installs the plugin's requirement or extra that contains the module, or else the package of the module's name.
    """
    for line in source.requires:
        project = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        # PEP 503: names of projects are equal without regard to case and to -, _ and dots; modules
        # are written with _.
        if project.lower().replace("-", "_").replace(".", "_") != module.lower():
            continue
        package, extra = source.distribution, re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        return pip_install(f"{package}[{extra[1]}]") if extra else f"pip install --upgrade {package}"
    return pip_install(module)


def _accepted(name: str, accepted: list[str]) -> str:
    if not accepted:
        return "it takes none; remove it"
    near = did_you_mean(name, accepted)
    return f"{f'{near} Its' if near else 'its'} parameters are: {', '.join(accepted)}"


def _home_of(name: str, named: Sequence[str], hints: Mapping[str, Any]) -> str:
    """Return ``did you mean 'optim.lr'?`` if a parameter is a record with a field of this name, else ``""``."""
    homes = [path for path in named if name in getattr(hints.get(path), "__struct_fields__", ())]
    return f"did you mean {f'{homes[0]}.{name}'!r}?" if homes else ""


def _type_hints(factory: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Dataclasses and msgspec structs annotate the class, ordinary classes their __init__.
    for part in (factory, factory.__init__) if inspect.isclass(factory) else (factory,):
        with suppress(NameError, TypeError):  # imported for type checkers only, or no annotations at all
            found |= get_type_hints(part, include_extras=True)
    return found


def _converted(component: str, name: str, value: Any, hint: Any, default: Any = None) -> Any:
    if hint is None or type(value) not in _JSON:
        return value
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct) and type(value) is dict:
        return _record(component, name, cast("dict[str, Any]", value), hint, default)
    try:
        return check_value(value, hint, f"{component}: {name}", example=default)
    except TypeError:  # a type that JSON cannot carry: the factory judges it
        return value
