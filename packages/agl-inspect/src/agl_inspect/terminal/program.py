"""The frame of the command line: global options, lazily loaded commands, errors as one paragraph."""

import logging
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import click

import agl
from agl.contracts import CommandEntry
from agl.errors import AglError, UnknownComponentError
from agl.hints import did_you_mean
from agl_inspect.terminal.opening import manager_of
from agl_inspect.terminal.output import STOPPED
from agl_inspect.text import visible


class Modes(click.Command):
    """A command that a flag turns into another one: ``agl metrics --plot`` reads the other words as that one does.

    Args:
        modes: The other commands, by flag.
    """

    def __init__(self, *args: Any, modes: Mapping[str, click.Command], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modes = modes

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the words after the command's name, without the flag that chose a mode."""
        words = args[: args.index("--")] if "--" in args else args
        flag = next((word for word in words if word in self.modes), None)
        if flag is None:
            return super().make_context(info_name, args, parent, **extra)
        args.remove(flag)
        return self.modes[flag].make_context(f"{info_name} {flag}", args, parent, **extra)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the modes with a line for each."""
        super().format_options(ctx, formatter)
        with formatter.section("Modes, each with its own --help"):
            formatter.write_dl([(flag, command.get_short_help_str(80)) for flag, command in self.modes.items()])


class OpenGroup(click.Group):
    """A group below ``agl`` to which plugins add commands whose record names it as the parent."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the group's own commands and of the plugins' commands."""
        return sorted([*super().list_commands(ctx), *(entry.name for entry in _entries_below(ctx, self.name or ""))])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing a plugin's; an unknown one is a usage error."""
        own, name = super().get_command(ctx, cmd_name), f"{self.name} {cmd_name}"
        names = self.list_commands(ctx)
        if own is None and cmd_name not in names:
            near = did_you_mean(cmd_name, names, otherwise=f"there are {', '.join(names)}")
            _plugin_command(ctx, name, otherwise=f"there is no command {name!r}; {near}")
        return own or _plugin_command(ctx, name)


class PluginGroup(click.Group):
    """Commands from plugin records: ``--help`` prints summaries, a command is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [entry.name for entry in _entries_below(ctx, "")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; an unknown one is a usage error with a close match or the install line."""
        return _plugin_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their summaries, importing none of them."""
        found = {entry.name: entry.summary for entry in _entries_below(ctx, "")}
        grouped = {name for names in _GROUPS.values() for name in names}
        for title, names in {**_GROUPS, "Operate": tuple(name for name in found if name not in grouped)}.items():
            if rows := [(name, found[name]) for name in names if name in found]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command; see :meth:`invoke` for errors."""
        with _refused():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        An :class:`AglError` becomes one paragraph on stderr and exit status 1, a usage error one and exit status 2;
        Ctrl-C ends with exit status 130.
        """
        try:
            with _refused():
                return super().invoke(ctx)
        except AglError as error:
            if ctx.params.get("debug"):
                click.echo(visible(traceback.format_exc()), err=True)
            raise click.ClickException(visible(str(error))) from error
        except KeyboardInterrupt:
            click.echo("\nstopped", err=True)
            sys.exit(STOPPED)


_GROUPS = {
    "Run": ("init", "check", "dev", "run", "worker", "serve", "exec"),
    "Look": ("runs", "show", "why", "metrics", "console", "sql"),
    "Versions": ("resources",),
    "Again and around": ("replay", "data", "plugins"),
}
"""The verbs of ``agl --help``, by what they are for; all others come last."""


class _UsageError(click.ClickException):
    """A usage error in one paragraph, where click prints three."""

    exit_code = 2


@contextmanager
def _refused() -> Generator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "agl"
        raise _UsageError(f"{error.format_message().rstrip('.')}; see: {where} --help") from error


def _entries_below(ctx: click.Context, parent: str) -> list[CommandEntry]:
    entries = manager_of(ctx).entries("command")
    return [entry for entry in entries if isinstance(entry, CommandEntry) and entry.parent == parent]


def _plugin_command(ctx: click.Context, name: str, *, otherwise: str = "") -> click.Command:
    """Import and return a plugin's command; one that no package of ours has is refused with ``otherwise``."""
    manager = manager_of(ctx)
    try:
        entry = manager.command(name)
    except UnknownComponentError as error:
        text = str(error)
        is_known = "; run: pip install" in text
        raise click.UsageError(text if is_known or not otherwise else otherwise, ctx) from error
    factory = manager.resolve(entry)
    return factory if isinstance(factory, click.Command) else factory()


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(agl.__version__, prog_name="agl")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--no-plugins", is_flag=True, is_eager=True, help="Load no plugins; use only the core's components.")
def cli(debug: bool, no_plugins: bool) -> None:
    """Train AI agents from their own runs."""


class _Formatter(logging.Formatter):
    """Escapes the control characters of agents' and models' text.

    An attempt's error is named in one line; ``agl show`` prints its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name == "agl_run.runners":
            text = f"{record.getMessage()}: {error}; agl show prints the traceback"
            record = logging.makeLogRecord({**record.__dict__, "msg": text, "args": None, "exc_info": None})
        return visible(super().format(record))


def main() -> None:
    """Entry point of the ``agl`` command."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    cli(prog_name="agl")
