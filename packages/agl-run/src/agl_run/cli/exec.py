"""``agl exec -- COMMAND``: record one run of any program, without an experiment.

With agl-gateway installed and an upstream endpoint, any program is recorded through the gateway. Without them, a
Python program is recorded from within. A summary of the recorded and the missed calls is printed on standard error.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from agl import PluginManager
from agl.hints import count_of
from agl.urls import base_url_of
from agl_inspect.stores import as_url, proposal, refuse_directory
from agl_inspect.terminal.opening import pass_manager
from agl_run.runners.recording import RecordedRun, StopRequest, record_command
from agl_run.watch.agreement import ATTRIBUTE, UNATTRIBUTED, UNSEEN, describe_calls

DEFAULT_STORE = "sqlite:///runs/agl.db"

_RECORDED = (
    "A Python program is recorded where its clients use httpx, as the openai and anthropic ones do; any other program "
    "where it reads OPENAI_BASE_URL: pass --upstream, the URL where its calls go."
)


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--store", "url", default=None, envvar="AGL_STORE", help="Store for the record.  [sqlite:///runs/agl.db]")
@click.option("--upstream", default=None, envvar="OPENAI_BASE_URL", help="Address for the program's model calls.")
@click.option(
    "--tracer",
    "tracers",
    multiple=True,
    metavar="NAME",
    help="In a Python program, also record agents and tools with this tracer, such as langchain; may be repeated.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Stop the program after this many seconds.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@pass_manager
def exec_(
    manager: PluginManager,
    url: str | None,
    upstream: str | None,
    tracers: tuple[str, ...],
    timeout_s: float | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND once and record its model calls; its output and exit status pass through.

    Ctrl-C and SIGTERM stop COMMAND with all its programs, and keep the record; the exit status is 130 or 143.
    """
    exec_program(manager, command, url=url, upstream=upstream, tracers=tracers, timeout_s=timeout_s)


def exec_program(
    manager: PluginManager,
    command: tuple[str, ...],
    *,
    url: str | None,
    upstream: str | None,
    timeout_s: float | None,
    tracers: tuple[str, ...] = (),
) -> NoReturn:
    """Run a program once, record its model calls, and exit with its status.

    Args:
        manager: The plugin manager, which finds the gateway and the tracers.
        command: The program and its arguments.
        url: The store's URL or path; by default ``runs/agl.db``.
        upstream: The OpenAI-compatible base URL to which the program's model calls go.
        timeout_s: Seconds after which the program is stopped.
        tracers: Names of tracers that record the agents and tools of a Python program.
    """
    for name in tracers:
        manager.tracer(name)  # an unknown name is refused before the program starts
    store_url = as_url(url or DEFAULT_STORE)
    refuse_directory(store_url, Path())
    started = time.monotonic()
    request = StopRequest()
    recording = record_command(
        command,
        manager=manager,
        store_url=store_url,
        upstream=base_url_of(upstream, who=_origin_of_upstream()) if upstream else "",
        tracers=tracers,
        timeout_s=timeout_s,
        request=request,
    )
    try:
        run: RecordedRun = asyncio.run(recording)
    except (KeyboardInterrupt, asyncio.CancelledError):
        # Where signals cannot be handled, asyncio reports Ctrl-C alone.
        number = request.number or signal.SIGINT
        click.echo(f"agl: {_stopped(number.name)} before the recording was complete", err=True)
        sys.exit(128 + number)
    seconds = time.monotonic() - started
    look = proposal("look with", "show", run.rollout_id, store_url=store_url)
    look = f";{look}" if look else ""
    if run.stopped_by:
        kept = f"{count_of(run.calls, 'model call')} recorded{look}"
        click.echo(f"agl: {_stopped(run.stopped_by)} after {seconds:.1f} s; {kept}", err=True)
        sys.exit(run.exit_code)
    click.echo(f"agl: recorded {count_of(run.calls, 'model call')} in {seconds:.1f} s{look}", err=True)
    for line in _missed(run, store_url):
        click.echo(f"agl: {line}", err=True)
    sys.exit(run.exit_code)


def _origin_of_upstream() -> str:
    source = click.get_current_context().get_parameter_source("upstream")
    return "OPENAI_BASE_URL" if source is ParameterSource.ENVIRONMENT else "--upstream"


def _stopped(by: str) -> str:
    return "stopped by Ctrl-C" if by == "SIGINT" else f"stopped by {by}"


def _missed(run: RecordedRun, store_url: str) -> Iterator[str]:
    """Yield a line about model calls that were not recorded, and one about recorded calls that belong to no agent."""
    unseen, unattributed = run.agreement.unseen, run.agreement.unattributed
    see = proposal("See", "why", run.rollout_id, store_url=store_url)
    if unseen:
        yield f"noticed {describe_calls(unseen, UNSEEN)}. {_RECORDED}{see}"
    elif not run.calls:
        yield f"no model call was seen. {_RECORDED}"
    if unattributed:
        yield f"noticed {describe_calls(unattributed, UNATTRIBUTED)}. {ATTRIBUTE}.{see}"
