"""Finds plugins by entry point and checks, before anything of theirs is imported, that they fit this core."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from agl.errors import BrokenPluginError
from agl.hookspecs import PROJECT
from agl.plugins.status import CORE, Source


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An installed plugin that was not imported yet."""

    source: Source
    load: Callable[[], object]


def candidates() -> list[Candidate]:
    """The installed plugins, in order of name, then distribution."""
    found = [_candidate(point) for point in entry_points(group=PROJECT)]
    return sorted(found, key=lambda candidate: (candidate.source.name, candidate.source.distribution))


def check_bound(source: Source, core_version: str) -> None:
    """Raise :class:`BrokenPluginError` when the distribution's own bound on the core excludes ``core_version``."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        requirements = [Requirement(line) for line in _lines_about_core(source.requires)]
    except InvalidRequirement as error:
        raise BrokenPluginError(
            f"the plugin {source.label} declares an unreadable requirement: {error}; {source.remedy}"
        ) from error
    for requirement in requirements:
        if canonicalize_name(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            raise BrokenPluginError(
                f"the plugin {source.label} requires {requirement}, but this is {CORE} {core_version}; "
                f"install releases that fit together (pip install --upgrade {CORE} {source.distribution}), "
                f"or {source.remedy}"
            )


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
