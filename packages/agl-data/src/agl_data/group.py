"""``agl data``: the group of the commands that bring runs in, write them out, and keep them elsewhere."""

import click

from agl_inspect.terminal import OpenGroup


@click.group(cls=OpenGroup)
def data() -> None:
    """Import, export, archive and copy what was recorded."""
