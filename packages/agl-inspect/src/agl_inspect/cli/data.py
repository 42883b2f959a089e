"""``agl data``: the group of the commands that import, export, archive and copy runs.

The commands themselves are in the plugins that read and write the data.
"""

import click

from agl_inspect.terminal.program import OpenGroup


@click.group(cls=OpenGroup)
def data() -> None:
    """Import, export, archive and copy records."""
