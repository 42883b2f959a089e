"""Finds plugins by entry point, describes their origin in messages, and checks their required version of the core."""

import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points

from agl._hookspecs import PROJECT
from agl.errors import BrokenPluginError
from agl.schemas import Record

CORE = "agl-core"
ENGINE = ("agl-inspect", "agl-run", "agl-store-sqlite")
"""The distributions of the engine; if installed, they are loaded with the core, even with ``--no-plugins``."""

DISABLED_VARIABLE = "AGL_DISABLED_PLUGINS"
STRICT_VARIABLE = "AGL_PLUGINS_STRICT"


class Source(Record, frozen=True, kw_only=True):
    """The origin of a plugin: its entry point and its distribution.

    Attributes:
        name: The entry point's name, or the name that was passed to ``register``.
        distribution: The installed distribution; ``""`` for a plugin that was registered as an object.
        version: The distribution's version.
        module: The module that the entry point names.
        requires: The distribution's ``Requires-Dist`` lines.
    """

    name: str
    distribution: str = ""
    version: str = ""
    module: str = ""
    requires: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """The plugin's name and distribution for messages, such as ``'toy' (agl-toy 1.0)``."""
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)

    @property
    def remedy(self) -> str:
        """Advice for the user if the plugin fails: reinstall, upgrade, correct or disable it."""
        # Nobody can run without the core, so leaving it out is no advice.
        if self.distribution == CORE:
            return f"reinstall it (pip install --force-reinstall {CORE})"
        disable = f"leave it out with {DISABLED_VARIABLE}={self.name}"
        if not self.distribution:
            return f"correct it or {disable}"
        return f"upgrade it (pip install --upgrade {self.distribution}), remove it, or {disable}"


def installed(distribution_name: str = "") -> list[tuple[Source, EntryPoint]]:
    """The installed plugins, of one distribution or of all, sorted by name and then by distribution.

    No plugin is imported; call ``load`` of its entry point to import it.
    """
    if not distribution_name:
        return _all(_folders())
    try:
        return _read(distribution(distribution_name).entry_points)
    except PackageNotFoundError:
        return []


def _folders() -> tuple[tuple[str, int], ...]:
    """The folders in which Python looks for distributions, each with the time of its last change."""
    names = [name or os.getcwd() for name in sys.path]
    return tuple((name, os.stat(name).st_mtime_ns) for name in names if os.path.exists(name))


@lru_cache(maxsize=1)
def _all(_: tuple[tuple[str, int], ...]) -> list[tuple[Source, EntryPoint]]:
    """Read all entry points, which are kept until a folder changes: that takes a file of every distribution."""
    return _read(entry_points(group=PROJECT))


def _read(points: Iterable[EntryPoint]) -> list[tuple[Source, EntryPoint]]:
    found = [(_source_of(point), point) for point in points if point.group == PROJECT]
    return sorted(found, key=lambda pair: (pair[0].name, pair[0].distribution))


def _source_of(point: EntryPoint) -> Source:
    dist = point.dist
    if dist is None:
        return Source(name=point.name, module=point.value)
    about = dist.metadata  # read once, because each of the distribution's properties parses the file again
    requires = tuple(about.get_all("Requires-Dist") or ())
    return Source(
        name=point.name, distribution=about["Name"], version=about["Version"], module=point.value, requires=requires
    )


def check_bound(source: Source, core_version: str) -> None:
    """Raise :class:`BrokenPluginError` if the requirements of the plugin's distribution exclude ``core_version``."""
    # Imported here, because a process without plugins does not need it.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        # Nearly all lines are about other distributions, and parsing every one of them would slow down each start.
        about = (each for each in source.requires if each.replace("_", "-").replace(".", "-").lower().startswith(CORE))
        requirements = [Requirement(line) for line in about]
    except InvalidRequirement as error:
        raise BrokenPluginError(
            f"the plugin {source.shown_name} declares an unreadable requirement: {error}; {source.remedy}"
        ) from error
    for requirement in requirements:
        if canonicalize_name(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        # pip checks bounds when it installs, and a later upgrade of the core alone may break them.
        # Pre-releases count, or every development version would be refused.
        if not requirement.specifier.contains(core_version, prereleases=True):
            raise BrokenPluginError(
                f"the plugin {source.shown_name} requires {requirement}, but this is {CORE} {core_version}; "
                f"install releases that fit together (pip install --upgrade {CORE} {source.distribution}), "
                f"or {source.remedy}"
            )
