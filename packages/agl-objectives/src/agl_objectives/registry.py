"""Finds losses and estimators by name: those of this distribution, of other plugins, and functions of the user's own.

A plugin registers them with the hooks `agl_losses` and `agl_estimators`. The core does not know these hooks, so an
implementation is marked `@agl.hookimpl(optionalhook=True)`; it is found in every plugin that a plugin manager with the
installed plugins has loaded, and a disabled plugin's is not found.
`module:name` names a class or a function that no plugin registers.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from agl import PluginManager
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_objectives import plugin as own
from agl_objectives.entries import EstimatorEntry, LossEntry
from agl_objectives.trial import try_estimator, try_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from agl.contracts import Entry
    from agl_objectives.contract import Estimator, Loss

__all__ = ["FoundEstimator", "FoundLoss", "estimators", "find_estimator", "find_loss", "is_own_loss", "losses"]

E = TypeVar("E", bound="Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLoss:
    """A loss that is ready to use, with its record."""

    entry: LossEntry
    call: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEstimator:
    """An estimator that is ready to use, with its record."""

    entry: EstimatorEntry
    call: Estimator


def find_loss(name: str, params: Mapping[str, Any] | None = None) -> FoundLoss:
    """Return the loss of that name with its parameters.

    Raises ConfigError for an unknown name, with the nearest and all known ones, for parameters that it does not take,
    and for what `trial.try_loss` refuses.
    """
    entry = _entry("loss", name, LossEntry, hook="agl_losses", known=own.agl_losses)
    call: Loss = _built("loss", entry, params or {})
    try_loss(name, call)
    return FoundLoss(entry=entry, call=call)


def find_estimator(name: str, params: Mapping[str, Any] | None = None) -> FoundEstimator:
    """Return the estimator of that name with its parameters; raises ConfigError as `find_loss` does."""
    entry = _entry("estimator", name, EstimatorEntry, hook="agl_estimators", known=own.agl_estimators)
    call: Estimator = _built("estimator", entry, params or {})
    try_estimator(name, call)
    return FoundEstimator(entry=entry, call=call)


def is_own_loss(name: str) -> bool:
    """Return true for a loss of this distribution, none of which reads entropies."""
    return name in {entry.name for entry in own.agl_losses()}


def losses() -> list[LossEntry]:
    """Return the records of all losses, ours first."""
    return [*own.agl_losses(), *_foreign("agl_losses", LossEntry)]


def estimators() -> list[EstimatorEntry]:
    """Return the records of all estimators, ours first."""
    return [*own.agl_estimators(), *_foreign("agl_estimators", EstimatorEntry)]


def _entry(kind: str, name: str, record: type[E], *, hook: str, known: Callable[[], Iterable[E]]) -> E:
    if ":" in name:
        return record(name=name, factory=name)
    ours = {entry.name: entry for entry in known()}
    if name in ours:
        return ours[name]  # the installed plugins are not looked through for what is here
    found = ours | {entry.name: entry for entry in _foreign(hook, record)}
    if name in found:
        return found[name]
    near = did_you_mean(name, found)
    raise ConfigError(
        f"No {kind} is named {name!r}{f'; {near}' if near else '.'} Use one of: {', '.join(found)}; or module:name for "
        "a function of your own."
    )


def _foreign(hook: str, record: type[E]) -> list[E]:
    """Return the records of other plugins, each name once; raises ConfigError for what is no record or clashes."""
    found: dict[str, E] = {}
    for status in PluginManager.from_environment().status():
        module = sys.modules.get(status.module) if status.state == "loaded" else None
        if module is None or module is own or not hasattr(module, hook):
            continue
        for entry in getattr(module, hook)():
            if not isinstance(entry, record):
                raise ConfigError(
                    f"{hook} of the plugin {status.name!r} yielded a {type(entry).__name__}; its author must yield "
                    f"agl_objectives.{record.__name__}(name=..., factory=...)."
                )
            if entry.name in found:
                raise ConfigError(f"Two plugins register {entry.name!r} with {hook}, {status.name!r} is one of them.")
            found[entry.name] = entry
    return list(found.values())


def _built(kind: str, entry: Entry, params: Mapping[str, Any]) -> Any:
    factory = _imported(kind, entry)
    taken = _checked(f"the {kind} {entry.name!r}", factory, params)
    # A class makes the function; a function is it already, and its keywords are its parameters.
    return factory(**taken) if inspect.isclass(factory) else partial(factory, **taken)


def _imported(kind: str, entry: Entry) -> Any:
    if not isinstance(entry.factory, str):
        return entry.factory
    module, _, attribute = entry.factory.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {kind} {entry.name!r} cannot be imported from {entry.factory!r}: {error}. Give module:name of a "
            "function or class that Python finds from where the experiment runs."
        ) from error


def _checked(component: str, factory: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return `params` in the annotated types; raises ConfigError for one that the factory does not take."""
    keywords = [p for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY]
    names = [parameter.name for parameter in keywords]
    unknown = [name for name in params if name not in names]
    if unknown:
        near = did_you_mean(unknown[0], names)
        hint = f"{near} Its" if near else "its"
        raise ConfigError(
            f"{component} takes no parameter {unknown[0]!r}; {hint} parameters are: {', '.join(names) or 'none'}"
        )
    absent = [p.name for p in keywords if p.default is p.empty and p.name not in params]
    if absent:
        raise ConfigError(f"{component} needs the parameter {absent[0]!r}; its parameters are: {', '.join(names)}")
    hints = _hints(factory)
    return {name: _converted(component, name, value, hints.get(name)) for name, value in params.items()}


def _hints(factory: Any) -> dict[str, Any]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return get_type_hints(target)
    except (NameError, TypeError):  # names that are imported for type checkers alone, or no annotations at all
        return {}


def _converted(component: str, name: str, value: Any, hint: Any) -> Any:
    try:
        return value if hint is None else msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{component}: the parameter {name!r} is wrong: {error}; got {value!r}") from error
