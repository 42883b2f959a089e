"""The ``agl`` command itself: global options, lazily loaded commands, and errors printed as one paragraph."""

import errno
import logging
import os
import sys
import threading
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
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
    """A command with modes: a flag hands over to another command, as ``agl metrics --plot`` runs ``plot``.

    Args:
        modes: The other commands, by flag.
    """

    def __init__(self, *args: Any, modes: Mapping[str, click.Command], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modes = modes

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments for the mode whose flag is given, or for this command if no such flag is given."""
        words = args[: args.index("--")] if "--" in args else args
        flag = next((word for word in words if word in self.modes), None)
        if flag is None:
            try:
                return super().make_context(info_name, args, parent, **extra)
            except click.NoSuchOption as error:  # click knows only this command's own options
                known = [*self.modes, *(name for each in self.params for name in each.opts)]
                near = get_close_matches(error.option_name, known, n=1)
                raise click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx) from None
        args.remove(flag)
        return self.modes[flag].make_context(f"{info_name} {flag}", args, parent, **extra)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then one line for each mode."""
        super().format_options(ctx, formatter)
        with formatter.section("Modes, each with its own --help"):
            formatter.write_dl([(flag, command.get_short_help_str(80)) for flag, command in self.modes.items()])


class OpenGroup(click.Group):
    """A command group to which plugins add commands: their entries name the group as ``parent``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the group's own commands and of the commands that plugins add."""
        return sorted([*super().list_commands(ctx), *(entry.name for entry in _entries_below(ctx, self.name or ""))])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported if a plugin adds it; an unknown name is a usage error."""
        own, name = super().get_command(ctx, cmd_name), f"{self.name} {cmd_name}"
        names = self.list_commands(ctx)
        if own is None and cmd_name not in names:
            _plugin_command(ctx, name, otherwise=_no_command(name, cmd_name, names))
        return own or _plugin_command(ctx, name)


class PluginGroup(click.Group):
    """The commands of all plugins: ``--help`` prints summaries, and a command is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [entry.name for entry in _entries_below(ctx, "")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; the error for an unknown name proposes a similar name or a package."""
        return _plugin_command(ctx, cmd_name, otherwise=_no_command(cmd_name, cmd_name, self.list_commands(ctx)))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their summaries, without importing a command."""
        found = {entry.name: entry.summary for entry in _entries_below(ctx, "")}
        grouped = {name for names in _GROUPS.values() for name in names}
        for title, names in {**_GROUPS, "Operate": tuple(name for name in found if name not in grouped)}.items():
            if rows := [(name, found[name]) for name in names if name in found]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options before the name of the command; :meth:`invoke` documents the errors."""
        with _refused():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        An :class:`AglError` is printed on stderr as one paragraph, with exit status 1; so is a usage error, with exit
        status 2. An :class:`OSError` is printed in the same way. Ctrl-C ends the program with exit status 130.
        """
        try:
            with _refused():
                return super().invoke(ctx)
        except AglError as error:
            if ctx.params.get("debug"):
                click.echo(visible(traceback.format_exc()), err=True)
            raise click.ClickException(visible(str(error))) from error
        except OSError as error:  # such as a full disk; click and the commands treat a closed terminal or pipe
            # Errors of sockets and of libraries for HTTP are OSErrors without a number, and often without a text.
            if ctx.params.get("debug") or error.errno in (None, errno.EPIPE, errno.EIO):
                raise
            hint = "correct that and repeat the command; agl --debug shows the traceback"
            raise click.ClickException(visible(f"the operating system refused: {error}; {hint}")) from error
        except KeyboardInterrupt:
            click.echo("\nstopped", err=True)
            sys.exit(STOPPED)


PATIENCE_S = 5.0
"""Seconds that threads of an agent or a plugin may run on after the command."""

_GROUPS = {
    "Run": ("init", "check", "dev", "run", "worker", "serve", "exec"),
    "Look": ("runs", "show", "why", "metrics", "console", "sql"),
    "Versions": ("resources",),
    "Reuse and extend": ("replay", "data", "plugins"),
}
"""The commands in each section of ``agl --help``; commands that are not listed come last."""


class _UsageError(click.ClickException):
    """A usage error that is printed as one paragraph instead of click's three."""

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


def _no_command(name: str, typed: str, names: list[str]) -> str:
    near = did_you_mean(typed, names, otherwise=f"there are {', '.join(names)}")
    return f"there is no command {name!r}; {near}"


def _plugin_command(ctx: click.Context, name: str, *, otherwise: str = "") -> click.Command:
    """Import and return a plugin's command.

    An unknown name is a usage error; its text is ``otherwise``, unless a package that is not installed has the command.
    """
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
    """Formats log records, with control characters escaped, because texts of agents and models may contain them.

    The error of an attempt is printed on one line, without its traceback, which ``agl show`` prints.
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
    try:
        cli(prog_name="agl")
    except SystemExit as done:
        # Python waits for threads that are no daemons, and an agent's module may have started one that never ends.
        timer = threading.Timer(PATIENCE_S, _leave_threads, [done.code])
        timer.daemon = True
        timer.start()
        raise


def _leave_threads(code: object) -> None:
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if left:
        names = ", ".join(thread.name for thread in left)
        logging.getLogger(__name__).warning("the command has ended, and stops threads that still run: %s", names)
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else code is not None)  # as Python itself does
