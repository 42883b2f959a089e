"""Compares the experiment's tracers with the installed frameworks and with those that the agent imports.

The requirements of a tracer's distribution say which releases of its framework it works with, so nothing is imported.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from agl import PluginManager
from agl.contracts import PluginStatus, TracerEntry
from agl.errors import ConfigError
from agl_run.plan import Plan

CORE = "agl-core"


def check_frameworks(plan: Plan) -> None:
    """Raise :class:`ConfigError` if a tracer's framework is missing or is a release that the tracer excludes."""
    for name in plan.config.tracers:
        status = _status(plan.manager, name)
        if status is None:
            continue
        for requirement in _frameworks(status.distribution):
            found = _version(requirement.name)
            # Frameworks publish release candidates for months, and people use them.
            if not (found and requirement.specifier.contains(found, prereleases=True)):
                state = f"{requirement.name} {found} is installed" if found else "it is not installed"
                bounded = f"{requirement.name}{requirement.specifier}"
                raise ConfigError(
                    f"the tracer {name!r} ({status.distribution} {status.version}) needs {bounded}, and {state}; "
                    f"run: pip install '{bounded}', or take {name!r} out of tracers"
                )


def unlisted_tracers(plan: Plan) -> list[str]:
    """Describe each installed tracer that the experiment does not list although the agent imports its framework."""
    manager, tracers = plan.manager, plan.config.tracers
    entries = [entry for entry in manager.entries("tracer") if isinstance(entry, TracerEntry)]
    covered = {entry.factory for entry in entries if entry.name in tracers}
    found: list[str] = []
    for entry in entries:
        status = _status(manager, entry.name)
        imported = [name for name in entry.frameworks if _imports(plan, name)]
        if imported and entry.factory not in covered and status is not None and status.distribution != CORE:
            covered.add(entry.factory)
            listed = ", ".join(f'"{name}"' for name in (*tracers, entry.name))
            found.append(
                f"the agent imports {imported[0]}, whose tracer is installed and not listed; write "
                f"tracers = [{listed}] above the first section, so that calls carry the names of their agents"
            )
    return found


def _status(manager: PluginManager, tracer: str) -> PluginStatus | None:
    return next((status for status in manager.status() if f"tracer {tracer}" in status.components), None)


def _frameworks(distribution: str) -> Iterator[Requirement]:
    """Yield the frameworks that a tracer's distribution requires.

    Requirements on agl packages and requirements of extras are left out.
    """
    if distribution in ("", CORE):
        return
    for requirement in map(Requirement, requires(distribution) or ()):
        # Requirements of extras do not hold for everyone who installs the adapter.
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.name.startswith("agl-"):
            yield requirement


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _imports(plan: Plan, framework: str) -> bool:
    """Return true if the process or the agent's source imports the framework.

    A module of the experiment's own folder does not count, even if it has the framework's name.
    """
    if not plan.agent.is_imported or not (framework in sys.modules or framework in _named_in_source(plan)):
        return False
    spec, folder = find_spec(framework), plan.folder.absolute()
    own = (folder / f"{framework}.py", folder / framework / "__init__.py")
    # A module of the experiment may have a framework's name.
    return spec is not None and Path(spec.origin or "") not in own


def _named_in_source(plan: Plan) -> set[str]:
    """Return the packages that the agent's module imports anywhere in its source."""
    module = sys.modules.get(plan.agent.path.partition(":")[0])
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix != ".py":
        return set()
    # The source is read because agents import frameworks inside of functions, which have not run
    # yet.
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}
