"""Starts ``agl console`` beside a run: a process of its own, so that reading takes no time of the trainer.

It ends with the run, after ``kill -9`` of the run as well: see :mod:`agl_run.runners.keeper`.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from agl import PluginManager
from agl.errors import ConfigError
from agl_inspect.stores import MEMORY, SQLITE, build_store
from agl_run.runners.bound_process import GRACE_S, KEEPER

_SLACK_S = 5.0
"""Seconds beyond the grace after which a console that does not end is killed."""


@contextmanager
def console_of(manager: PluginManager, store_url: str) -> Generator[str]:
    """Serve the console over a store for as long as the block lasts; yields its address.

    Raises:
        UnknownComponentError: ``agl-console`` is not installed; the message says how to install it.
        ConfigError: No other process can read the store, or the console did not start.
    """
    manager.command("console")
    if store_url.startswith(MEMORY):
        raise ConfigError(
            f"--console reads the store from another process, and {store_url} exists in this one alone; write "
            'store = "sqlite:///runs/agl.db" under [experiment], or leave --console away'
        )
    if sys.platform == "win32":
        raise ConfigError("--console needs Linux or macOS; run agl console in another terminal")
    if store_url.startswith(SQLITE) and not Path(store_url.removeprefix(SQLITE)).exists():
        asyncio.run(_create(manager, store_url))
    control, process = _start([sys.executable, "-m", "agl", "console", store_url], manager)
    try:
        yield _address(process)
    finally:
        control.close()  # the keeper ends the console
        try:
            process.wait(GRACE_S + _SLACK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def _create(manager: PluginManager, store_url: str) -> None:
    """Make the file that the console reads and the run is about to fill."""
    store = build_store(manager, store_url)
    try:
        await store.cursor()
    finally:
        await store.close()


def _start(words: list[str], manager: PluginManager) -> tuple[socket.socket, subprocess.Popen[str]]:
    """Start a program below a keeper, which ends it when the returned socket closes."""
    ours, its = socket.socketpair()
    keeper = [sys.executable, "-I", "-S", KEEPER, str(its.fileno()), str(os.getpid()), str(GRACE_S), "stop"]
    try:
        process = subprocess.Popen(
            [*keeper, *words],
            env={**os.environ, **manager.worker_env()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=(its.fileno(),),
            start_new_session=True,
            text=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
    return ours, process


def _address(process: subprocess.Popen[str]) -> str:
    """Read the address from the first line that the console prints."""
    said = process.stdout.readline() if process.stdout is not None else ""
    if not said.startswith("console at "):
        raise ConfigError(
            "the console did not start; its own message stands above, and agl run works without --console"
        )
    return said.removeprefix("console at ").partition(" ")[0]
