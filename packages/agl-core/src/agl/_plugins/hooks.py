"""Reads one plugin: refuses hooks that would never be called, and collects the plugin's components.

pluggy accepts a misspelled hook, a function without the marker and a coroutine function, and then silently never runs
them. Here each of them raises an error that names the remedy.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast, get_args, get_type_hints

import pluggy

from agl._entries import Entry
from agl._hookspecs import PROJECT, AglSpec
from agl.errors import PluginError
from agl.hints import did_you_mean

HOOKS = tuple(name for name in vars(AglSpec) if name.startswith(f"{PROJECT}_"))

PROVIDERS: dict[str, type[Entry]] = {
    # Read from the annotations of the specification, so that hook and record cannot diverge.
    name: record
    for name in HOOKS
    for record in get_args(get_type_hints(getattr(AglSpec, name))["return"])
}
"""Maps each provider hook to the type of entry that it returns."""

OBSERVERS = tuple(name for name in HOOKS if name not in PROVIDERS)

MOST = 1_000
"""The most components that a hook may return; a hook that yields more would probably never end."""

_NAME = re.compile(r"[a-z][a-z0-9+-]*")
_FACTORY = re.compile(r"[\w.]+:[\w.]+")


def hookimpls(hooks: pluggy.PluginManager, hook: str) -> list[pluggy.HookImpl]:
    """The implementations of one hook: those marked ``tryfirst``, then the others, then those marked ``trylast``."""
    caller: pluggy.HookCaller = getattr(hooks.hook, hook)
    # pluggy itself calls the last registered implementation first. Here they keep the order of
    # registration, and each is called separately.
    return sorted(caller.get_hookimpls(), key=lambda impl: (impl.trylast, not impl.tryfirst))


def check_hooks(hooks: pluggy.PluginManager, plugin: object) -> None:
    """Raise :class:`PluginError` if a function in ``plugin`` looks like a hook but would never be called."""
    for name, function in _functions(plugin):
        if getattr(function, f"{PROJECT}_impl", None) is None:
            raise PluginError(f"{name} is not marked; write @agl.hookimpl above it, or give it another name")
    for caller in hooks.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin:
                _check_impl(caller, impl)


def components(hooks: pluggy.PluginManager, plugin: object) -> list[Entry]:
    """The entries that the provider hooks of ``plugin`` return; raises :class:`PluginError` for an invalid one."""
    found: list[Entry] = []
    for hook, record in PROVIDERS.items():
        for impl in hookimpls(hooks, hook):
            if impl.plugin is plugin:
                found.extend(_entries(impl, hook, record))
    return found


def _functions(plugin: object) -> Iterator[tuple[str, Any]]:
    home = plugin.__name__ if inspect.ismodule(plugin) else None
    for name in dir(plugin):
        if not name.startswith(f"{PROJECT}_"):
            continue
        member = inspect.getattr_static(plugin, name)
        function = getattr(member, "__func__", member)
        # Only functions defined in the module: one that is imported to be called is not an
        # implementation.
        if inspect.isfunction(function) and (home is None or function.__module__ == home):
            yield name, function


def _check_impl(caller: pluggy.HookCaller, impl: pluggy.HookImpl) -> None:
    if caller.spec is None and not impl.optionalhook:
        hint = did_you_mean(caller.name, HOOKS, otherwise=f"the hooks are {', '.join(HOOKS)}")
        raise PluginError(f"{caller.name} is not a hook; {hint}")
    # pluggy would run a wrapper around the other implementations; called by itself, it would only
    # make a generator.
    if impl.wrapper or impl.hookwrapper:
        raise PluginError(f"{caller.name} is a wrapper; hooks are called one by one, so remove wrapper=True")
    if inspect.iscoroutinefunction(impl.function) or inspect.isasyncgenfunction(impl.function):
        raise PluginError(f"{caller.name} is async; hooks are synchronous, so do async work in what the factory builds")


def _entries(impl: pluggy.HookImpl, hook: str, record: type[Entry]) -> Iterator[Entry]:
    result: object = impl.function()
    if not isinstance(result, Iterable):
        raise PluginError(f"{hook} returned {type(result).__name__}; yield {record.__name__} records")
    for number, entry in enumerate(cast("Iterable[Any]", result)):  # pyright: ignore[reportUnknownVariableType]  # checked in the next line
        if not isinstance(entry, record):
            found = type(entry).__name__  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # of anything
            raise PluginError(f"{hook} yielded a {found}; yield agl.contracts.{record.__name__}(name=..., factory=...)")
        if number >= MOST:
            raise PluginError(f"{hook} yields more than {MOST} components; end its loop")
        yield _checked(entry, hook)


def _checked(entry: Entry, hook: str) -> Entry:
    # Names stand in TOML, in URLs (the scheme of a store) and on command lines.
    if not isinstance(entry.name, str) or not _NAME.fullmatch(entry.name):  # pyright: ignore[reportUnnecessaryIsInstance]  # a plugin may pass anything
        raise PluginError(
            f"{hook} names a component {entry.name!r}; use lower case, digits and hyphens, starting with a letter"
        )
    if isinstance(entry.factory, str) and not _FACTORY.fullmatch(entry.factory):
        raise PluginError(f"the factory {entry.factory!r} of {entry.name!r} is not of the form 'package.module:name'")
    if not isinstance(entry.factory, str) and not callable(entry.factory):
        raise PluginError(
            f"the factory of {entry.name!r} is a {type(entry.factory).__name__}; pass a callable or 'm:name'"
        )
    return entry
