"""The plugin manager: loads plugins, builds their components and calls their observers.

The manager never imports a framework: a plugin's entry point names a light module that has only entries, and a
component's own module is imported when :meth:`PluginManager.build` is called.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

import pluggy

import agl
from agl import _builtin as builtin
from agl._entries import (
    AlgorithmEntry,
    CommandEntry,
    CreditEntry,
    Entry,
    ExporterEntry,
    GatewayEntry,
    Kind,
    ModalityEntry,
    PluginState,
    PluginStatus,
    PolicyEntry,
    RedactorEntry,
    RewardEntry,
    RunnerEntry,
    StoreEntry,
    TracerEntry,
)
from agl._hookspecs import PROJECT, AglSpec
from agl._plugins.build import build, check_contract, resolve
from agl._plugins.catalog import KINDS, RECORDS, Catalog, Key, QuarantinedPlugin, key_of, missing
from agl._plugins.hooks import OBSERVERS, check_hooks, components, hookimpls
from agl._plugins.sources import (
    CORE,
    DISABLED_VARIABLE,
    ENGINE,
    STRICT_VARIABLE,
    Source,
    check_bound,
    installed,
)
from agl.errors import BrokenPluginError, DuplicateComponentError, PluginError, describe

E = TypeVar("E", bound=Entry)

EVERY = "*"
"""In ``AGL_DISABLED_PLUGINS``, stands for every plugin except the core's own components."""

CORE_PLUGIN = "core"

SLOW_S = 5.0
"""Seconds of loading after which a plugin is named in a warning, because its import may never end."""

_log = logging.getLogger("agl.plugins")


class PluginManager:
    """Registered plugins and their components.

    A new manager has the components of ``agl-core`` and, where they are installed, of ``agl-run``, ``agl-inspect`` and
    ``agl-store-sqlite``. :meth:`load` adds the other installed plugins, and :meth:`register` adds a module or object.
    Looking components up is safe from several threads; registering is not.

    Args:
        disabled: Names of entry points or distributions to leave out; ``"*"`` for all.
        strict: Raise at the first plugin that fails instead of quarantining it.
    """

    def __init__(self, *, disabled: Iterable[str] = (), strict: bool = False) -> None:
        self._disabled = frozenset(disabled)
        self._strict = strict
        self._hooks = pluggy.PluginManager(PROJECT)
        self._hooks.add_hookspecs(AglSpec)
        self._catalog = Catalog()
        self._loaded: dict[str, Source] = {}
        self._broken: list[QuarantinedPlugin] = []
        self._skipped: list[Source] = []
        # Kept for plugins that fail after they named components: the error for one of these
        # components then names the plugin.
        self._named: dict[Source, tuple[Key, ...]] = {}
        self._failures: dict[str, int] = {}
        core = Source(name=CORE_PLUGIN, distribution=CORE, version=agl.__version__, module=builtin.__name__)
        # The core registers through the same hooks as every plugin; if it cannot use a hook, the
        # hook is at fault.
        self._admit(core, builtin)
        for source, point in [found for distribution in ENGINE for found in installed(distribution)]:
            self._load(source, point)

    @classmethod
    def from_environment(
        cls,
        disabled: Iterable[str] = (),
        strict: bool | None = None,
        load: bool = True,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> "PluginManager":
        """A manager with the installed plugins.

        Args:
            disabled: Plugins to leave out, in addition to those in ``AGL_DISABLED_PLUGINS`` (separated by commas).
            strict: See the class; by default true if ``AGL_PLUGINS_STRICT`` is ``1``, ``true``, ``yes`` or ``on``.
            load: Whether to load installed plugins; false has the effect of ``--no-plugins``.
            environ: The environment variables to read.
        """
        names = [name.strip() for name in environ.get(DISABLED_VARIABLE, "").split(",") if name.strip()]
        if strict is None:
            strict = environ.get(STRICT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")
        manager = cls(disabled=(*disabled, *names, *(() if load else (EVERY,))), strict=strict)
        manager.load()
        return manager

    def load(self) -> None:
        """Load the installed plugins in order of name; a plugin that fails is quarantined, or raises if strict."""
        for source, point in installed():
            # Already loaded by the constructor, even with --no-plugins: nothing runs without a
            # store and a runner.
            if source.distribution in ENGINE:
                continue
            if self._disabled & {EVERY, source.name, source.distribution}:
                self._skipped.append(source)
            else:
                self._load(source, point)

    def register(self, plugin: object, *, name: str = "") -> None:
        """Add a module or object with hook implementations; raises :class:`PluginError` if it cannot be used."""
        name = name or getattr(plugin, "__name__", "") or type(plugin).__qualname__
        source = Source(name=name, module=getattr(plugin, "__module__", "") or name)
        try:
            self._admit(source, plugin)
        except Exception as error:  # noqa: BLE001  # raised again, with the plugin's name
            failure = _failure(source, error)
            raise failure from _cause_of(failure, error)

    def tracer(self, name: str) -> TracerEntry:
        """The tracer with this name; like all lookups by name, raises :class:`PluginError` for an unknown name."""
        return self._get(TracerEntry, name)

    def reward(self, name: str) -> RewardEntry:
        """The reward emitter with this name."""
        return self._get(RewardEntry, name)

    def store_entry(self, scheme: str) -> StoreEntry:
        """The store for a URL scheme."""
        return self._get(StoreEntry, scheme)

    def algorithm(self, name: str) -> AlgorithmEntry:
        """The algorithm with this name."""
        return self._get(AlgorithmEntry, name)

    def credit(self, name: str) -> CreditEntry:
        """The credit assignment with this name."""
        return self._get(CreditEntry, name)

    def runner(self, name: str) -> RunnerEntry:
        """The runner with this name."""
        return self._get(RunnerEntry, name)

    def policy(self, name: str) -> PolicyEntry:
        """The model server with this name."""
        return self._get(PolicyEntry, name)

    def modality(self, name: str) -> ModalityEntry:
        """The modality with this name."""
        return self._get(ModalityEntry, name)

    def gateway(self, name: str) -> GatewayEntry:
        """The gateway with this name."""
        return self._get(GatewayEntry, name)

    def redactor(self, name: str) -> RedactorEntry:
        """The redactor with this name."""
        return self._get(RedactorEntry, name)

    def exporter(self, name: str) -> ExporterEntry:
        """The exporter or sink with this name."""
        return self._get(ExporterEntry, name)

    def command(self, name: str) -> CommandEntry:
        """The command with this name."""
        return self._get(CommandEntry, name)

    def entry(self, kind: Kind, name: str) -> Entry:
        """The component with this kind and name."""
        return self._get(RECORDS[kind], name)

    def entries(self, kind: Kind) -> Sequence[Entry]:
        """All components of a kind, sorted by name."""
        return self._catalog.entries(RECORDS[kind])

    def resolve(self, entry: Entry, /) -> Any:
        """Import and return the entry's factory; see :meth:`build`."""
        return resolve(entry, _shown_name(entry), self._source_of(entry))

    def check(self, entry: Entry, /) -> None:
        """Import the entry's factory; if it is a class, check that it has the methods of its contract."""
        factory = self.resolve(entry)
        if isinstance(factory, type):
            check_contract(factory, entry, _shown_name(entry), self._source_of(entry))

    def build(self, entry: Entry, /, **params: Any) -> Any:
        """Build the component.

        Raises:
            ConfigError: A parameter is unknown, missing or of the wrong type; the message lists the accepted ones.
            PluginError: The component's module is broken, or needs a package that is not installed.
        """
        return build(entry, _shown_name(entry), self._source_of(entry), params)

    def notify(self, hook: str, /, **values: Any) -> None:
        """Call the observers of a hook, one after the other.

        If an observer raises, the others are still called. Only the first error of each plugin is logged.

        Raises:
            PluginError: ``hook`` is not an observer hook.
        """
        if hook not in OBSERVERS:
            raise PluginError(f"{hook!r} is not an observer hook; use one of {', '.join(OBSERVERS)}")
        for impl in hookimpls(self._hooks, hook):
            try:
                impl.function(*(values[name] for name in impl.argnames))
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001  # an observer only watches
                self._note_failure(impl.plugin_name, hook, error)

    def status(self) -> list[PluginStatus]:
        """The status of every plugin that was found, sorted by name after the core itself."""
        loaded = [self._status(source, "loaded", self._catalog.keys_of(source)) for source in self._loaded.values()]
        broken = [self._status(item.source, "broken", item.keys, error=str(item.error)) for item in self._broken]
        skipped = [self._status(source, "disabled") for source in self._skipped]
        # The core always loads first.
        rest = sorted([*loaded[1:], *broken, *skipped], key=lambda status: (status.name, status.distribution))
        return [loaded[0], *rest]

    def worker_env(self) -> dict[str, str]:
        """The environment variables that make a child process load the same plugins."""
        return {DISABLED_VARIABLE: ",".join(sorted(self._disabled)), STRICT_VARIABLE: "1" if self._strict else "0"}

    @property
    def unmatched(self) -> list[str]:
        """Disabled names that match no installed plugin."""
        known = {EVERY} | {name for source in self._skipped for name in (source.name, source.distribution)}
        return sorted(self._disabled - known)

    def _load(self, source: Source, point: EntryPoint) -> None:
        said = ("the plugin %s still loads; %s", source.shown_name, source.remedy)
        slow = threading.Timer(SLOW_S, _log.warning, said)
        slow.daemon = True
        if point.module not in sys.modules:
            slow.start()
        try:
            check_bound(source, agl.__version__)
            # What a plugin prints must not mix with a command's output, which a program may read.
            with redirect_stdout(sys.stderr):
                self._admit(source, point.load())
        # KeyboardInterrupt passes through: a person pressed Ctrl-C during a slow import.
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001  # one plugin must not take the others with it
            failure = _failure(source, error)
            if self._strict:
                raise failure from _cause_of(failure, error)
            if failure is not error:
                # The message is one line; whoever debugs the plugin needs the traceback behind it.
                failure.__cause__ = error
            self._broken.append(QuarantinedPlugin(source=source, error=failure, keys=self._named.get(source, ())))
            _log.warning("%s", failure)
        finally:
            slow.cancel()

    def _admit(self, source: Source, plugin: object) -> None:
        if source.name in self._loaded:
            other = self._loaded[source.name].shown_name
            raise PluginError(f"another plugin has this name: {other}; remove one of the two")
        self._hooks.register(plugin, name=source.name)
        try:
            check_hooks(self._hooks, plugin)
            entries = components(self._hooks, plugin)
            self._named[source] = tuple(key_of(entry) for entry in entries)
            self._catalog.add(source, entries, reserved=(CORE_PLUGIN, "inspect", "run", "store-sqlite"))
        # A plugin that fails half-way must leave no hooks behind, even if the user interrupted it.
        except BaseException:
            self._hooks.unregister(plugin)
            raise
        self._loaded[source.name] = source

    def _get(self, record: type[E], name: str) -> E:
        found = self._catalog.get(record, name)
        if found is None:
            kind = KINDS[record]
            raise missing((kind, name), self._catalog.names(kind), self._broken, self._skipped)
        return found

    def _source_of(self, entry: Entry) -> Source:
        return self._catalog.source_of(entry) or Source(name=entry.name)

    def _note_failure(self, plugin: str, hook: str, error: BaseException) -> None:
        self._failures[plugin] = self._failures.get(plugin, 0) + 1
        # Logged once: an observer that fails at every rollout would bury the run's own lines.
        if self._failures[plugin] == 1:
            source = self._loaded[plugin]
            _log.error(
                "%s of the plugin %s raised; the run continues, and further failures of this plugin are only counted "
                "(see: agl plugins list); %s",
                hook,
                source.shown_name,
                source.remedy,
                exc_info=error,
            )

    def _status(self, source: Source, state: PluginState, keys: Iterable[Key] = (), *, error: str = "") -> PluginStatus:
        return PluginStatus(
            name=source.name,
            distribution=source.distribution,
            version=source.version,
            module=source.module,
            state=state,
            components=tuple(f"{kind} {name}" for kind, name in keys),
            error=error,
            failures=self._failures.get(source.name, 0) if state == "loaded" else 0,
        )


def _shown_name(entry: Entry) -> str:
    return f"the {key_of(entry)[0]} {entry.name!r}"


def _failure(source: Source, error: BaseException) -> PluginError:
    if isinstance(error, BrokenPluginError | DuplicateComponentError):
        return error
    what = str(error) if isinstance(error, PluginError) else describe(error)
    return BrokenPluginError(f"the plugin {source.shown_name} failed to load: {what}; {source.remedy}")


def _cause_of(failure: PluginError, error: BaseException) -> BaseException | None:
    return None if failure is error else error
