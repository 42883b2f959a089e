"""Shares the plugin manager between commands through click's context; made on first use."""

import click

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
