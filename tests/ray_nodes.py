"""An installation whose attempts run on a Ray cluster of two nodes, each on a machine of its own.

The trainer runs on the machine of the head, because Ray wants a driver to be on a node.
"""

import os
import random
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from tools.networks import Networks

from .database import DatabaseProcess
from .networked import NetworkedInstallation
from .programs import Place, Program, command_of, family_of, start_of

PORT = 6379

PORTS = {
    "node-manager": 6380,
    "object-manager": 6381,
    "metrics-export": 6382,
    "dashboard-agent-grpc": 6383,
    "dashboard-agent-listen": 6384,
    "runtime-env-agent": 6385,
    "min-worker": 10002,
    "max-worker": 10999,
}
"""Every port of a node; where agents have none of their own, a node waits until they say theirs, and then gives up."""

HEAD, NODE = "Ray's head", "Ray's node"

LIVES_S = {HEAD: 40.0, NODE: 20.0, "worker": 20.0, "trainer": 6.0}
"""Seconds for which a program works at most before it is killed; Ray's take long to start."""

OTHERS_LIVE_S = 120.0

WORKER = "ray::WorkerActor"
"""The beginning of the title of a process that runs attempts."""

AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-the-tests-0123456789abcdef"}


def run_ray(*words: str) -> None:
    """The ``ray`` command."""
    from ray.scripts.scripts import main

    sys.argv[:] = ["ray", *words]
    main()


@dataclass
class RayNode(Program):
    """The processes of Ray on one machine; the workers end with them."""

    head: Program | None = None

    def begin(self, host: str = "") -> None:
        """Start it as soon as its head works."""
        if self.head is None or (self.head.is_alive() and self.head.works()):
            super().begin(host)
        else:
            self.process = None

    def is_done(self) -> bool:
        """Return false: it is needed to the end."""
        return False

    def kill(self) -> list[tuple[int, str]]:
        """``kill -9`` of all processes of Ray itself; returns the workers, which must end by themselves."""
        assert self.process is not None
        assert self.process.pid is not None
        family = [(pid, start_of(pid), command_of(pid)) for pid in family_of(self.process.pid)]
        workers = {below for pid, _, command in family if command.startswith(WORKER) for below in family_of(pid)}
        for pid, _, _ in family:
            if pid not in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.join()
        return [(pid, start) for pid, start, _ in family if pid in workers]


@dataclass
class Driver(Program):
    """A program that needs a Ray cluster."""

    head: Program | None = None

    def begin(self, host: str = "") -> None:
        """Start it as soon as there is a cluster."""
        assert self.head is not None
        if self.head.is_alive() and self.head.works():
            super().begin(host)
        else:
            self.process = None


@dataclass
class WorkerProcess(DatabaseProcess):
    """The process of one of Ray's workers, which Ray starts again."""

    driver: Program | None = None

    def is_done(self) -> bool:
        """Return true after the end of the trainer, which needs no workers any more."""
        return self.driver is not None and self.driver.is_done()


@dataclass(frozen=True)
class Workers:
    """The processes of workers on some machines."""

    networks: Networks
    machines: tuple[str, ...]

    def children(self) -> list[int]:
        """Return their ids."""
        found = [pid for machine in self.machines for pid in self.networks.processes(machine)]
        return [pid for pid in found if command_of(pid).startswith(WORKER)]

    def answers(self) -> bool:
        """Return true if there is one."""
        return bool(self.children())

    def kill(self) -> None:
        """``kill -9`` of one."""
        with suppress(ProcessLookupError):
            os.kill(random.choice(self.children()), signal.SIGKILL)


@dataclass
class RayInstallation(NetworkedInstallation):
    """PostgreSQL, ``agl serve``, a trainer, writers, and two nodes of Ray, with links that are cut.

    Attributes:
        sessions: A folder for the files of Ray's nodes, with a short path.
    """

    sessions: Path = Path()

    def programs(self) -> list[Program]:
        """Every program, the head before its node and the trainer."""
        others = [one for one in super().programs() if not one.name.startswith(("worker", "trainer"))]
        head, node = (self._node(RayNode, name) for name in (HEAD, NODE))
        node.head = head
        trainer = Driver("trainer", "on the Ray cluster", self._log("trainer"), self._train, moves=False, head=head)
        nodes = tuple(self.machines[name] for name in (HEAD, NODE))
        actors = Workers(self.networks, nodes)
        known = {"sign": "", "log": self._log("workers"), "start": self._serve, "moves": False}
        worker = WorkerProcess("worker", server=actors, driver=trainer, **known)
        links = [self.network(f"link of {name}", [name]) for name in dict.fromkeys(self.machines.values())]
        programs = [*others, head, node, trainer, worker, *links]
        for program in programs:
            program.lives_s = self.pace * LIVES_S.get(program.name, OTHERS_LIVE_S)
        return programs

    @property
    def cluster(self) -> str:
        """The address of Ray's head."""
        return f"{self.host_of(HEAD)}:{PORT}"

    def left(self, machines: Iterable[str]) -> list[str]:
        """Return the commands of the processes that run on some machines."""
        return [command_of(pid) for machine in machines for pid in self.networks.processes(machine)]

    def _node(self, kind: type[RayNode], name: str) -> RayNode:
        return kind(name, "Ray runtime started", self._log(name), partial(self._start_node, name), moves=False)

    def _start_node(self, name: str, host: str) -> BaseProcess:
        words = ["start", "--block", "--disable-usage-stats", "--num-cpus=1", f"--object-store-memory={100 << 20}"]
        words += [f"--node-ip-address={self.host_of(name)}", f"--temp-dir={self.sessions / self.machines[name]}"]
        words += [f"--{name}-port={number}" for name, number in PORTS.items()]
        words += ["--include-log-monitor=false"]
        is_head = name == HEAD
        own = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
        words += own if is_head else [f"--address={self.cluster}"]
        place = Place(folder=self.file.parent, variables=self.variables, host=host, network=self.network_of(name))
        return self.forks.start(run_ray, tuple(words), place=place, log=self._log(name))
