"""Finds plugins by entry point, and checks that they fit this core before they are imported."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points

from agl._hookspecs import PROJECT
from agl._plugins.source import CORE, Source
from agl.errors import BrokenPluginError


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An installed plugin that was not imported yet."""

    source: Source
    load: Callable[[], object]


def candidates(distribution_name: str = "") -> list[Candidate]:
    """The installed plugins, all or those of one distribution, in order of name, then distribution."""
    found = [_candidate(point) for point in _entry_points(distribution_name)]
    return sorted(found, key=lambda candidate: (candidate.source.name, candidate.source.distribution))


def check_bound(source: Source, core_version: str) -> None:
    """Raise :class:`BrokenPluginError` when the distribution's own bound on the core excludes ``core_version``."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        requirements = [Requirement(line) for line in _lines_about_core(source.requires)]
    except InvalidRequirement as error:
        raise BrokenPluginError(
            f"the plugin {source.shown_name} declares an unreadable requirement: {error}; {source.remedy}"
        ) from error
    for requirement in requirements:
        if canonicalize_name(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            raise BrokenPluginError(
                f"the plugin {source.shown_name} requires {requirement}, but this is {CORE} {core_version}; "
                f"install releases that fit together (pip install --upgrade {CORE} {source.distribution}), "
                f"or {source.remedy}"
            )


def _entry_points(distribution_name: str) -> Iterable[EntryPoint]:
    if not distribution_name:
        return entry_points(group=PROJECT)
    try:
        return distribution(distribution_name).entry_points.select(group=PROJECT)
    except PackageNotFoundError:
        return ()


def _lines_about_core(requires: Iterable[str]) -> list[str]:
    return [line for line in requires if line.replace("_", "-").replace(".", "-").lower().startswith(CORE)]


def _candidate(point: EntryPoint) -> Candidate:
    dist = point.dist
    source = Source(
        name=point.name,
        distribution=dist.name if dist else "",
        version=dist.version if dist else "",
        module=point.value,
        requires=tuple(dist.requires or ()) if dist else (),
    )
    return Candidate(source=source, load=point.load)
