"""``agl plugins``: list the installed plugins with their components, and check them.

``list`` and ``show`` import no component; ``check`` imports every one to find those that do not work.
"""

import sys
from threading import Timer

import click

from agl import PluginManager
from agl.contracts import CommandEntry, Kind, PluginStatus
from agl.errors import AglError, MissingExtraError, PluginError, UnknownComponentError
from agl.hints import count_of, did_you_mean
from agl.schemas import Record
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.terminal.output import json_option, print_json, print_table

SLOW_S = 5.0
"""Seconds after which ``agl plugins check`` names the component that is still being imported."""


class PluginProblem(Record, frozen=True, kw_only=True):
    """A plugin or component that does not work; ``error`` gives the reason and the next step."""

    plugin: str
    component: str
    error: str
    is_optional: bool = False


@click.group()
def plugins() -> None:
    """List, show and check plugins."""


@plugins.command("list")
@json_option
@pass_manager
def list_(manager: PluginManager, as_json: bool) -> None:
    """List all installed plugins with their state and components."""
    statuses = manager.status()
    if as_json:
        print_json(statuses)
        return
    rows = [(s.name, s.distribution, s.version, s.state, ", ".join(s.components)) for s in statuses]
    print_table(("plugin", "distribution", "version", "state", "components"), rows)
    for status in statuses:
        if status.error:
            click.echo(f"\n{status.error}")


@plugins.command()
@click.argument("name")
@json_option
@pass_manager
def show(manager: PluginManager, name: str, as_json: bool) -> None:
    """Show a plugin's distribution, and every component with its factory."""
    status = _named(manager, name)
    entries = [(component, *_entry_of(manager, component)) for component in status.components]
    if as_json:
        keys = ("component", "factory", "summary")
        print_json({"plugin": status, "components": [dict(zip(keys, entry, strict=True)) for entry in entries]})
        return
    click.echo(f"{status.name}: {status.state}\ndistribution: {status.distribution} {status.version}")
    click.echo(f"module: {status.module}")
    if status.error:
        click.echo(f"error: {status.error}")
    if entries:
        print_table(("component", "factory", "summary"), entries)


@plugins.command()
@click.argument("name", required=False)
@json_option
@pass_manager
@click.pass_context
def check(ctx: click.Context, manager: PluginManager, name: str | None, as_json: bool) -> None:
    """Import every component and report errors.

    A missing method is such an error. If there are any, the exit status is 1. A component whose extra is not installed
    is listed, but is not an error. Losses and estimators are also called once.
    """
    statuses = [_named(manager, name)] if name else manager.status()
    found = [finding for status in statuses for finding in (*_findings(manager, status), *_tried(manager, status))]
    sound = [finding.component for finding in found if not finding.error]
    findings = [finding for finding in found if finding.error]
    findings += [_unmatched(entry) for entry in manager.unmatched if not name]
    if as_json:
        print_json(findings)
    for finding in findings if not as_json else ():
        click.echo(f"{finding.plugin}: {'optional: ' if finding.is_optional else ''}{finding.error}")
    if sound and not as_json:
        click.echo(f"tried: {', '.join(sound)}")
    is_wrong = any(not finding.is_optional for finding in findings)
    if not is_wrong and not as_json:
        components = sum(len(status.components) for status in statuses) + len(sound)
        click.echo(f"{count_of(len(statuses), 'plugin')} with {count_of(components, 'component')}: all well")
    ctx.exit(1 if is_wrong else 0)


def _findings(manager: PluginManager, status: PluginStatus) -> list[PluginProblem]:
    if status.state == "broken":
        return [PluginProblem(plugin=status.name, component="", error=status.error)]
    found: list[PluginProblem] = []
    for component in status.components:
        kind, name = _split(component)
        slow = Timer(SLOW_S, click.echo, [f"still importing the {kind} {name!r} ..."], {"err": True})
        slow.daemon = True
        slow.start()
        try:
            manager.check(manager.entry(kind, name))
        except AglError as error:
            found.append(_problem(status, component, error))
        finally:
            slow.cancel()
    return found


def _tried(manager: PluginManager, status: PluginStatus) -> list[PluginProblem]:
    """Run the checks below ``plugins check`` for which the plugin has a hook; a component that works has no error."""
    found: list[PluginProblem] = []
    module = sys.modules.get(status.module) if status.state == "loaded" else None
    for check in manager.entries("command"):
        if isinstance(check, CommandEntry) and check.parent == "plugins check" and hasattr(module, f"agl_{check.name}"):
            try:
                errors: dict[str, str] = manager.resolve(check)(module)
                found += [PluginProblem(plugin=status.name, component=key, error=errors[key]) for key in errors]
            except AglError as error:
                found.append(_problem(status, check.name, error))
    return found


def _problem(status: PluginStatus, component: str, error: AglError) -> PluginProblem:
    is_optional = isinstance(error, MissingExtraError)
    return PluginProblem(plugin=status.name, component=component, error=str(error), is_optional=is_optional)


def _unmatched(name: str) -> PluginProblem:
    message = f"AGL_DISABLED_PLUGINS names {name!r}, which no installed plugin has; correct it or take it out"
    return PluginProblem(plugin=name, component="", error=message)


def _named(manager: PluginManager, name: str) -> PluginStatus:
    statuses = manager.status()
    for status in statuses:
        if name in (status.name, status.distribution):
            return status
    names = [status.name for status in statuses]
    hint = did_you_mean(name, names, otherwise=f"there are: {', '.join(names)}")
    raise UnknownComponentError(f"no plugin named {name!r} is installed; {hint}")


def _entry_of(manager: PluginManager, component: str) -> tuple[str, str]:
    try:
        entry = manager.entry(*_split(component))
    except PluginError:
        return "", "cannot be used"
    return entry.factory if isinstance(entry.factory, str) else repr(entry.factory), entry.summary


def _split(component: str) -> tuple[Kind, str]:
    kind, _, name = component.partition(" ")
    return kind, name  # pyright: ignore[reportReturnType]  # the manager wrote it as "<kind> <name>"
