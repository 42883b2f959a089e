"""``agl worker``: run rollouts of a running experiment, on this machine or another."""

import asyncio
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import click

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl.urls import shown_url
from agl_inspect.stores import as_url, build_store, located
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.terminal.output import json_option, print_json
from agl_run.access.trust import CA_ENV
from agl_run.access.worker_token import WORKER_TOKEN_ENV, worker_key
from agl_run.checks.notices import crowded_loop
from agl_run.config.sections import RunnerConfig
from agl_run.plan import Plan
from agl_run.terminal import experiment_argument, read_experiment
from agl_run.worker.admission import make_worker_plan
from agl_run.worker.heap import settle_heap
from agl_run.worker.remote import RemoteWorker
from agl_run.worker.setup import ca_of

_SQLITE = "sqlite:///"


@click.command()
@experiment_argument
@click.option("--store", "store_url", metavar="URL", help="The store's address from this machine.")
@click.option("--gateway", "gateway_url", default="", metavar="URL", help="The gateway's address from this machine.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Attempts at once; by default the number in FILE.")
@click.option("--stay", "stays", is_flag=True, help="When the experiment is finished, wait for its next run.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
@pass_manager
def worker(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    store_url: str | None,
    gateway_url: str,
    concurrency: int | None,
    stays: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run rollouts of the running experiment in FILE until it is finished."""
    config, plugins = read_experiment(file, settings, manager=manager)
    if gateway_url and not gateway_url.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {gateway_url!r} is not a URL; write http://HOST:PORT")
    plan = make_worker_plan(config, folder=file.absolute().parent, manager=plugins)
    if ca := ca_of(plan):
        os.environ.setdefault(CA_ENV, str(ca))  # its store is mostly that which the gateway serves
    # Zero in the file leaves all attempts to workers, and this is one.
    at_once = concurrency or config.runner.concurrency or RunnerConfig().concurrency

    def tell(event: str, text: str, **values: Any) -> None:
        if as_json:
            print_json({"event": event, "time": time.time(), "text": text, **values})
        elif not quiet:
            click.echo(text)

    for text in crowded_loop(plan.config.runner.use, at_once, key="--concurrency" if concurrency else "concurrency"):
        tell("warning", text)

    async def work() -> None:
        _stop_on_sigterm()
        settle_heap()
        store = _open(plan, store_url)
        try:
            remote = RemoteWorker(plan, store, tell=tell, concurrency=at_once, gateway_url=gateway_url, stays=stays)
            await remote.run()
        finally:
            await store.close()

    try:
        asyncio.run(work())
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell("stopped", "stopped; running attempts were given back")


def _stop_on_sigterm() -> None:
    """Cancel the current task on SIGTERM, as asyncio does for Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if task is not None:
            # A signal handler may interrupt the loop between any two bytecodes.
            loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, stop)


def _open(plan: Plan, given: str | None) -> Store:
    """Open the experiment's store; raises :class:`ConfigError` if it is missing or in another process's memory."""
    url = located(as_url(given) if given else plan.config.experiment.store, plan.folder)
    if url.startswith("memory:"):
        raise ConfigError(
            f"the experiment's store is {url}, which only its own process can open; set [experiment] store to a URL "
            "that both reach, or give --store http://HOST:PORT of the experiment's gateway"
        )
    if url.startswith(_SQLITE) and not Path(url.removeprefix(_SQLITE)).exists():
        raise ConfigError(
            f"there is no store {url} on this machine. Where the experiment runs elsewhere, give --store "
            "http://HOST:PORT of its gateway or of `agl serve`; where it runs here, start it first"
        )
    if worker_key() and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{WORKER_TOKEN_ENV} or its file is set, which a gateway checks, and the store is {shown_url(url)}, which "
            "checks none; give --store http://HOST:PORT of the experiment's gateway or of `agl serve`, or unset it and "
            "set AGL_SECRET, which trusts this machine as the trainer"
        )
    return build_store(plan.manager, url)
