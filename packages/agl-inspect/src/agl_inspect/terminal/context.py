"""Reads click's context for commands: the plugin manager, made on first use, and the options that were given."""

import click
from click.core import ParameterSource

from agl import PluginManager
from agl.errors import AglError

pass_manager = click.make_pass_decorator(PluginManager)
"""Decorator that passes the plugin manager as a command's first argument."""


def manager_of(ctx: click.Context) -> PluginManager:
    """Return the manager of this invocation, after ``--no-plugins`` and the environment variables."""
    root = ctx.find_root()
    if not isinstance(root.obj, PluginManager):
        try:
            root.obj = PluginManager.from_environment(load=not root.params.get("no_plugins"))
        except AglError as error:
            raise click.ClickException(str(error)) from error
    return root.obj


def given_options(ctx: click.Context) -> dict[str, str]:
    """Return the options that were written on the command line, by the names of their parameters."""
    return {
        param.name: max(param.opts, key=len)
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }
