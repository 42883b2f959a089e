"""The formats of ``agl data export``: the built-in ones, and those that plugins register as subcommands of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from agl import PluginManager
from agl.contracts import CommandEntry, RolloutQuery, Store
from agl.errors import UnknownComponentError
from agl.hints import closest
from agl_data.export.preferences import recorded
from agl_data.export.target import STDOUT, print_losses, target_of
from agl_inspect.exports import ExportSetup, ExportWriter, Losses
from agl_inspect.terminal.opening import manager_of

_BELOW = "export"


class FormatName(click.ParamType[str]):
    """The type of the option ``--format``: the name of a built-in format, or of a format that a plugin adds.

    Args:
        own: The names of the built-in formats.
    """

    name = "format"

    def __init__(self, own: Sequence[str]) -> None:
        self._own = tuple(own)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; fails with a usage error that lists the known formats if it is unknown."""
        given = str(value)
        if given in self._own or ctx is None:
            return given
        manager = manager_of(ctx)
        names = self._names(manager)
        try:
            manager.command(f"{_BELOW} {given}")
        except UnknownComponentError as error:
            near = closest(given.lower(), names)
            own = "" if "available: " in str(error) or "did you mean" in str(error) else f"; {error}"
            more = f"; did you mean {near!r}?" if near else own
            self.fail(f"{given!r} is not one of {', '.join(map(repr, names))}{more}", param, ctx)
        return given

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that start with ``incomplete``."""
        return [CompletionItem(name) for name in self._names(manager_of(ctx)) if name.startswith(incomplete)]

    def _names(self, manager: PluginManager) -> list[str]:
        return [*self._own, *(entry.name for entry in formats_of(manager))]


class ExportCommand(click.Command):
    """A command whose help lists the formats of the installed plugins."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the plugins' formats with their summaries, without importing any of them."""
        super().format_epilog(ctx, formatter)
        found = formats_of(manager_of(ctx))
        if found:
            with formatter.section("Formats of plugins"):
                formatter.write_dl([(entry.name, entry.summary) for entry in found])


def formats_of(manager: PluginManager) -> list[CommandEntry]:
    """Return the formats that plugins register, sorted by name."""
    entries = manager.entries("command")
    return [entry for entry in entries if isinstance(entry, CommandEntry) and entry.parent == _BELOW]


async def export_with_plugin(
    manager: PluginManager,
    store: Store,
    query: RolloutQuery,
    *,
    form: str,
    output: Path | None,
    agents: str | None,
    min_reward: float | None,
) -> int:
    """Write rollouts in a plugin's format, and print the losses; returns the number of records written."""
    factory = manager.resolve(manager.command(f"{_BELOW} {form}"))
    losses = Losses()
    count = 0
    with target_of(output, losses) as file:
        path = output if output != STDOUT else None
        writer: ExportWriter = factory(setup=ExportSetup(file=file, path=path, losses=losses))
        async for item in recorded(store, query, agents, min_reward=min_reward, has_blobs=writer.reads_blobs):
            count += writer.write(item)
        writer.close()
    print_losses(losses, form)
    return count
