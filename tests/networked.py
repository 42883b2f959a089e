"""An installation whose programs have machines of their own: network namespaces on links that are slow and lossy."""

import os
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools.networks import HUB, Networks, enter, forbidden

from .database import PostgresInstallation, server_module
from .programs import Forks, Program

LAN = "lan"

DELAY_MS = 20
LOSS = 0.01


@dataclass
class Network(Program):
    """Links of machines, one after the other in random order."""

    networks: Networks = field(default_factory=lambda: Networks(names=(LAN,)))
    machines: tuple[str, ...] = ()
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    unplugged: str = ""
    is_up: bool = False

    def begin(self, host: str = "") -> None:
        """Plug the machine in again."""
        del host
        if self.unplugged:
            self.networks.heal(self.unplugged)
        self.is_up, self.unplugged = True, ""

    def is_alive(self) -> bool:
        """Return true unless a link is cut."""
        return self.is_up

    def works(self) -> bool:
        """Return true: it works as soon as it is plugged in."""
        return self.is_up

    def is_done(self) -> bool:
        """Return false: it is needed to the end."""
        return False

    def ended_by_itself(self) -> bool:
        """Return false: only the test unplugs it."""
        return False

    def kill(self) -> list[tuple[int, str]]:
        """Unplug a machine."""
        self.unplugged = self.draw.choice(self.machines)
        self.networks.cut(self.unplugged)
        self.is_up = False
        return []


@dataclass
class NetworkedInstallation(PostgresInstallation):
    """An installation with a machine for each program.

    Attributes:
        machines: The machine of each program, by the program's name.
    """

    networks: Networks = field(default_factory=lambda: Networks(names=(LAN,)))
    machines: Mapping[str, str] = field(default_factory=dict[str, str])

    def host_of(self, name: str) -> str:
        """Return the address of a program's machine."""
        return self.networks.addresses[self.machines[name], LAN]

    def network_of(self, name: str) -> str:
        """Return the network namespace of a program's machine."""
        return self.networks.namespace(self.machines[name])

    def network(self, name: str, machines: Iterable[str], *, lives_s: float = 4.0) -> Network:
        """Return links that are cut, as a program."""
        known = {"sign": "", "log": self._log("network"), "start": self._serve, "moves": False, "is_kept": True}
        names = tuple(sorted(set(machines)))
        return Network(name, lives_s=lives_s * self.pace, networks=self.networks, machines=names, **known)


def networked(networks: Networks) -> type:
    """Return the class of a PostgreSQL server on its own machine."""
    base: Any = server_module().Server
    address = networks.addresses["database", LAN]

    class NetworkedServer(base):
        def _create(self) -> None:
            super()._create()
            self.stop()
            with (self.data / "pg_hba.conf").open("a") as access:
                access.write("host all open samenet trust\nhost all all samenet scram-sha-256\n")
            self.host = address
            self.start()

        def _command(self) -> list[Any]:
            there = [*networks.inside("database"), "setpriv", "--reuid=nobody", "--clear-groups"]
            return [*(there if self.host == address else []), *super()._command()]

        @property
        def user(self) -> str | None:
            return None if self.host == address else super().user

    return NetworkedServer


@contextmanager
def joined(machines: Iterable[str]) -> Iterator[Networks]:
    """Make a network with machines; the caller is in its hub."""
    if os.getuid():
        pytest.skip("only root makes networks")
    if reason := forbidden():
        pytest.skip(f"this kernel makes no networks: {reason}")
    networks = Networks(names=(LAN,))
    Forks().prepare()  # in the network of other tests, not in the hub
    before = f"/proc/{os.getpid()}/task/{os.getpid()}/ns/net"
    with Path(before).open("rb") as own:
        try:
            networks.open()
            for machine in dict.fromkeys(machines):
                networks.join(machine, [LAN])
            print(networks.slow_down(delay_ms=DELAY_MS, loss=LOSS))
            enter(networks.namespace(HUB))
            yield networks
        finally:
            enter(f"/proc/self/fd/{own.fileno()}")
            networks.close()
