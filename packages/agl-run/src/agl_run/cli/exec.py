"""``agl exec -- COMMAND``: record one run of any program, with no experiment.

With agl-gateway installed and an upstream endpoint, any program is recorded through the gateway. Without them, a
Python program is recorded from within.
"""

import click

from agl import PluginManager
from agl_inspect.terminal.opening import pass_manager
from agl_run.run.exec import exec_program


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.option(
    "--store", "url", default=None, envvar="AGL_STORE", help="Where to keep the record.  [sqlite:///runs/agl.db]"
)
@click.option("--upstream", default=None, envvar="OPENAI_BASE_URL", help="Where the program's model calls go.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Seconds after which the program is stopped.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@pass_manager
def exec_(
    manager: PluginManager, url: str | None, upstream: str | None, timeout_s: float | None, command: tuple[str, ...]
) -> None:
    """Run COMMAND once and record its model calls; its output and exit status pass through.

    Ctrl-C and SIGTERM end COMMAND with all that it started, and keep its record; the exit status is 130 or 143.
    """
    exec_program(manager, command, url=url, upstream=upstream, timeout_s=timeout_s)
