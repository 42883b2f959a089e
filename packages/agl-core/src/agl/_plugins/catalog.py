"""The registered components by kind and name, with the plugin of each, and errors for missing components."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from agl._entries import CommandEntry, Entry, Kind
from agl._plugins.hooks import PROVIDERS
from agl._plugins.sources import DISABLED_VARIABLE, Source
from agl.errors import BrokenPluginError, DuplicateComponentError, PluginError, UnknownComponentError
from agl.hints import closest, pip_install

E = TypeVar("E", bound=Entry)
Key = tuple[Kind, str]

KINDS: dict[type[Entry], Kind] = {
    # The kind's name follows from the record's, so that a new kind is declared in one place.
    record: cast("Kind", record.__name__.removesuffix("Entry").lower())
    for record in PROVIDERS.values()
}
RECORDS: dict[Kind, type[Entry]] = {kind: record for record, kind in KINDS.items()}


@cache
def known() -> dict[tuple[Kind, str], str]:
    """The distribution of each well-known component, by kind and name, which errors about a missing one suggest.

    ``python -m tools.generate`` writes the table.
    """
    table = Path(__file__).with_name("packages.json").read_bytes()
    found = msgspec.json.decode(table, type=dict[str, dict[Kind, list[str]]])
    return {(kind, name): home for home, kinds in found.items() for kind, names in kinds.items() for name in names}


@dataclass(frozen=True, kw_only=True)
class QuarantinedPlugin:
    """A plugin that failed to load, with its error and the components that it had registered before."""

    source: Source
    error: PluginError
    keys: tuple[Key, ...] = ()

    def may_hold(self, key: Key) -> bool:
        """True if the plugin registered the component before it failed, or is likely to contain it."""
        return key in self.keys or is_likely_home(key, self.source)


def key_of(entry: Entry) -> Key:
    """The kind and the name of a component; the name of a subcommand starts with that of its parent command."""
    # A plugin may subclass our entries; the nearest known base class decides.
    kind: Kind = next(KINDS[record] for record in type(entry).__mro__ if record in KINDS)
    parent = entry.parent if isinstance(entry, CommandEntry) else ""
    return kind, f"{parent} {entry.name}" if parent else entry.name


def is_likely_home(key: Key, source: Source) -> bool:
    """True if a plugin, judged without importing it, is likely to contain the component."""
    # There are two signs: the plugin's name, which is often that of its only component, and the
    # table of well-known components.
    home = known().get(key, "").partition("[")[0]
    return key[1] == source.name or (source.distribution != "" and home == source.distribution)


class Catalog:
    """The registered components. A name that two plugins register raises, at registration and at each lookup."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[Source, Entry]] = {}
        # If two plugins register one component, the order of installation would decide which one
        # runs; so both are refused until the user chooses.
        self._contested: dict[Key, str] = {}

    def add(self, source: Source, entries: Sequence[Entry], *, reserved: Iterable[str] = ()) -> None:
        """Register all entries, or none if one of them is already registered.

        Components that belong to a plugin in ``reserved`` stay usable after such a clash.

        Raises:
            DuplicateComponentError: A component is already registered; the message names both plugins.
        """
        # Collected first and added at the end, because a plugin is admitted with all of its
        # components or not at all.
        fresh: dict[Key, tuple[Source, Entry]] = {}
        for entry in entries:
            key = key_of(entry)
            owner = fresh.get(key) or self._entries.get(key)
            if owner is not None:
                message = _clash(key, owner[0], source)
                # The engine's own components stay usable; otherwise a plugin could disable the
                # default store.
                if owner[0].name not in {*reserved, source.name}:
                    self._contested[key] = message
                raise DuplicateComponentError(message)
            fresh[key] = (source, entry)
        self._entries.update(fresh)

    def get(self, record: type[E], name: str) -> E | None:
        """The component with this name; ``None`` for an unknown name.

        Raises:
            DuplicateComponentError: Two plugins register the name.
        """
        key = (KINDS[record], name)
        if key in self._contested:
            raise DuplicateComponentError(self._contested[key])
        entry = self._entries.get(key, (None, None))[1]
        return entry if isinstance(entry, record) else None

    def entries(self, record: type[E]) -> list[E]:
        """All components of a kind, sorted by name."""
        found = [entry for _, entry in self._entries.values() if isinstance(entry, record)]
        return sorted(found, key=lambda entry: entry.name)

    def source_of(self, entry: Entry) -> Source | None:
        """The plugin that registered exactly this entry object; ``None`` for another entry of the same name."""
        source, registered = self._entries.get(key_of(entry), (None, None))
        return source if registered is entry else None

    def keys_of(self, source: Source) -> list[Key]:
        """Keys of the components that a plugin registered, in order of registration."""
        return [key for key, (owner, _) in self._entries.items() if owner is source]

    def names(self, kind: Kind) -> list[str]:
        """The sorted names of a kind's components."""
        return sorted(name for found, name in self._entries if found == kind)


def missing(
    key: Key, names: Sequence[str], broken: Sequence[QuarantinedPlugin], disabled: Sequence[Source]
) -> PluginError:
    """The error for a component that is not registered; ``names`` are the registered components of its kind."""
    kind, name = key
    for plugin in broken:
        if plugin.may_hold(key):
            return _quarantined(key, plugin)
    for source in disabled:
        if is_likely_home(key, source):
            return UnknownComponentError(
                f"the {kind} {name!r} is in the plugin {source.shown_name}, which is disabled; "
                f"take it out of {DISABLED_VARIABLE} (or of --no-plugins) to use it"
            )
    parts = [f"no {kind} is named {name!r}{_suggestion(key, names)}", *_advice(key, names)]
    if broken:
        plugins = ", ".join(plugin.source.shown_name for plugin in broken)
        parts.append(f"it may be in a plugin that failed to load: {plugins} (see: agl plugins check)")
    error = UnknownComponentError("; ".join(parts))
    # The component may be in one of the plugins that failed to load; then their tracebacks help.
    error.__cause__ = _cause(broken)
    return error


def _suggestion(key: Key, names: Sequence[str]) -> str:
    kind, name = key
    # Names are lower case; people write GRPO as the paper does.
    near = closest(name.lower(), [*names, *(one for known_kind, one in known() if known_kind == kind)])
    if key in known() or not near:
        return ""
    install = "" if near in names else f" Then run: {pip_install(known()[kind, near])}"
    return f" (did you mean {near!r}?{install})"


def _advice(key: Key, names: Sequence[str]) -> list[str]:
    if key in known():
        return [f"run: {pip_install(known()[key])}"]
    if names:
        return [f"available: {', '.join(names)}"]
    homes = sorted({home for (kind, _), home in known().items() if kind == key[0]})
    return [f"no {key[0]} is installed", *(f"run: {pip_install(home)}" for home in homes)]


def _quarantined(key: Key, plugin: QuarantinedPlugin) -> PluginError:
    error = BrokenPluginError(f"the {key[0]} {key[1]!r} cannot be used: {plugin.error}")
    error.__cause__ = plugin.error
    return error


def _cause(broken: Sequence[QuarantinedPlugin]) -> BaseException | None:
    if len(broken) < 2:
        return broken[0].error if broken else None
    return ExceptionGroup("plugins that failed to load", [plugin.error for plugin in broken])


def _clash(key: Key, owner: Source, source: Source) -> str:
    if owner.name == source.name:
        return f"the plugin {source.shown_name} registers the {key[0]} {key[1]!r} twice; {source.remedy}"
    return (
        f"the {key[0]} {key[1]!r} is registered by two plugins, {owner.shown_name} and {source.shown_name}; "
        f"remove one of them, or leave one out with {DISABLED_VARIABLE}={source.name}"
    )
