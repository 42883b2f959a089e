"""``agl data``: the group of the commands that bring runs in, write them out, and keep them elsewhere.

The packages that read and write the data bring the commands.
"""

import click

from agl_inspect.terminal.program import OpenGroup


@click.group(cls=OpenGroup)
def data() -> None:
    """Import, export, archive and copy records."""
