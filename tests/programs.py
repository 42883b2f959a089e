"""Programs that are killed and come back, forked from one process that has imported what all of them need.

A program that is started anew spends seconds on imports; a forked one works at once, so that a test has time for many
kills.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from tools.networks import enter

IMPORTS = (
    "agl_run.cli.run",
    "agl_run.cli.worker",
    "agl_run.worker.remote",
    "agl_run.runners.process",
    "agl_store_sqlite",
    "agl_gateway.cli.serve",
    "agl_gateway.client",
    "agl_gateway.embedded",
    "agl_store_postgres.store",
    "agl_testing.stores.samples",
    "openai.resources.chat.completions",
    "ray.scripts.scripts",
)
"""Modules that are imported once; what is not installed is left out."""

Main = Callable[..., None]


def run_agl(*words: str) -> None:
    """The ``agl`` command."""
    from agl_inspect.terminal.program import main

    sys.argv[1:] = words
    main()


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine, folder and variables of a program.

    Attributes:
        host: Name of the machine; ``""`` is this one's.
        lease_s: Seconds of every lease; ``None`` leaves them as they are.
        network: Name of a network namespace; ``""`` for that of whoever starts the program.
    """

    folder: Path
    variables: Mapping[str, str]
    host: str = ""
    lease_s: float | None = None
    network: str = ""

    def enter(self) -> None:
        """Make this process one of the place, without the folders of agents that other tests have imported."""
        sys.path[:] = [entry for entry in sys.path if not Path(entry, "toy_agent.py").exists()]
        os.environ.clear()
        os.environ.update(self.variables)
        os.chdir(self.folder)
        if self.network:
            enter(self.network)
        if self.host:
            socket.gethostname = lambda: self.host
        if self.lease_s is not None:
            shorten_leases(self.lease_s)


def shorten_leases(seconds: float) -> None:
    """Let this process's leases of attempts and of the experiment last so long."""
    from agl_inspect.ownership import Ownership
    from agl_run.worker import worker as worker

    worker.LEASE_S = seconds
    Ownership.__init__.__kwdefaults__ |= {"lease_s": seconds, "beat_s": seconds / 4}


@dataclass
class Forks:
    """Forks programs; what still runs in the end is killed by :meth:`close`."""

    started: list[BaseProcess] = field(default_factory=list[BaseProcess])

    def prepare(self) -> None:
        """Start the process from which all are forked, which outlives the test and is shared with others."""
        multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTS, __name__])
        with mock.patch.dict(os.environ, RAY_AUTH_MODE="token"):  # Ray reads it when it is imported
            forkserver.ensure_running()

    def start(self, main: Main, words: tuple[str, ...], *, place: Place, log: Path) -> BaseProcess:
        """Run ``main(*words)`` in a process of its own that writes to ``log``."""
        self.prepare()
        log.write_bytes(b"")
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=(main, words, place, log))
        process.start()
        self.started.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()
            process.join()
            process.close()


def _run(main: Main, words: tuple[str, ...], place: Place, log: Path) -> None:
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    place.enter()
    main(*words)


@dataclass
class Program:
    """One program of an installation.

    Attributes:
        name: Its class, for the report.
        sign: Text in its output once it works.
        log: The file with its output.
        start: Starts it on a machine of that name.
        lives_s: Seconds for which it works at most before it is killed.
        moves: It may come back under the name of another machine.
        is_kept: It stays for the look at what was lost.
    """

    name: str
    sign: str
    log: Path
    start: Callable[[str], BaseProcess]
    lives_s: float = 3.0
    moves: bool = True
    is_kept: bool = False
    process: BaseProcess | None = None

    def begin(self, host: str = "") -> None:
        """Start it."""
        self.process = self.start(host)

    def is_alive(self) -> bool:
        """Return true if it runs."""
        return self.process is not None and self.process.is_alive()

    def works(self) -> bool:
        """Return true once its output has the sign."""
        return self.sign in self.output()

    def output(self) -> str:
        """Everything that it wrote since it was last started."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def is_done(self) -> bool:
        """Return true if it ended well, and need not come back."""
        return self.process is not None and self.process.exitcode == 0

    def ended_by_itself(self) -> bool:
        """Return true if it ran and nobody killed it."""
        return self.process is not None and not self.is_alive() and self.process.exitcode != -9

    def kill(self) -> list[tuple[int, str]]:
        """``kill -9``; returns its descendants, each with the time of its start."""
        assert self.process is not None
        assert self.process.pid is not None
        family = [(pid, start_of(pid)) for pid in family_of(self.process.pid)[1:]]
        self.process.kill()
        self.process.join()
        return family


def family_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def start_of(pid: int) -> str:
    """The time at which a process started, which tells it from a later one of the same id; ``""`` if it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] == "Z" else after_name[19]


def command_of(pid: int) -> str:
    """The command line of a process; ``""`` if it is gone, or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that have not ended."""
    return [pid for pid in pids if command_of(pid)]
