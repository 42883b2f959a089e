"""Runs the services of the compose file as plain processes, with the commands, variables and health checks in it."""

import base64
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from agl_run.access.tokens import AttemptTokens
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import wait_until

from .conftest import AGENT, deploy

SERVER = Path(__file__).parents[2] / "agl-store-postgres" / "tests" / "conftest.py"

MONITORING = Path(__file__).parents[1] / "src" / "agl_deploy" / "templates" / "chart" / "files"

HOLDING = AGENT.replace(
    "    async with",
    '    pathlib.Path(os.environ["HOME"], f"began-{os.getpid()}").touch()\n'
    '    while not pathlib.Path(os.environ["HOME"], "go").exists():\n'
    "        await asyncio.sleep(0.05)\n"
    "    async with",
)

SECRETS = {
    "AGL_SECRET": "a-secret-of-thirty-two-characters",
    "AGL_TOKEN": "an-admin-token-of-this-test",
    "AGL_CONSOLE_PASSWORD": "a-password-of-this-test",
    "PGPASSWORD": "a-database-password",
    "DEPLOY_MODEL_KEY": "a-key-of-a-provider",
}
_TOKENS = AttemptTokens(SECRETS["AGL_SECRET"].encode())
SECRETS["AGL_WORKER_TOKEN"] = _TOKENS.issue_for_worker("answers", expires_at=time.time() + 3600)


def server_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agl_deploy_postgres_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a PostgreSQL server with the user and the database of the compose file's server."""
    module = server_module()
    with module.found_binaries() as binaries:
        server = module.Server(binaries)
        try:
            with server.connect() as connection:
                connection.execute(f"CREATE ROLE agl LOGIN PASSWORD '{SECRETS['PGPASSWORD']}'")
                connection.execute("CREATE DATABASE agl OWNER agl ENCODING 'UTF8' TEMPLATE template0")
            yield server.port
        finally:
            server.remove()


class Services:
    """Starts services of a compose file, with only the settings that the file gives them.

    Host names are replaced by this machine's, ports by free ones, and folders of the images by folders of the test.
    """

    def __init__(self, project: Path, database: int) -> None:
        self.project = project
        self.compose: dict[str, Any] = yaml.safe_load((project / "deploy" / "compose.yaml").read_text())
        ports = dict(zip((4747, 4748, 8000), free_ports(3), strict=True))
        (project / "data").mkdir()
        self._changes = {
            "agl@postgres/": f"agl@127.0.0.1:{database}/",
            "//gateway:": "//127.0.0.1:",
            "advertise=trainer": "advertise=127.0.0.1",
            "=/data/": f"={project}/data/",
            "/opt/agl/health.py": str(project / "deploy" / "health.py"),
            **{str(old): str(new) for old, new in ports.items()},
        }
        self._opened = ExitStack()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, service: str = "") -> subprocess.Popen[bytes]:
        """Start a service; ``name`` distinguishes several processes of the same service."""
        own = self.compose["services"][service or name]
        log = self._opened.enter_context((self.project / f"{name}.log").open("wb"))
        self.processes[name] = subprocess.Popen(
            self._words(own["command"]), cwd=self.project, env=self._environment(own), stdout=log, stderr=log
        )
        return self.processes[name]

    def is_healthy(self, name: str) -> bool:
        """Run a service's health check, once."""
        own = self.compose["services"][name]
        kind, *words = own["healthcheck"]["test"]
        assert "CMD" == kind
        process = self.processes.get(name)
        assert process is None or process.poll() is None, self.log(name)
        return not subprocess.run(self._words(words), env=self._environment(own), capture_output=True).returncode

    def metrics(self) -> set[str]:
        """Return the names of the metrics that gateway and console expose to Prometheus."""
        password = base64.b64encode(f"prometheus:{SECRETS['AGL_CONSOLE_PASSWORD']}".encode()).decode()
        found = set[str]()
        for port in ("4747", "8000"):
            url = f"http://127.0.0.1:{self._changes[port]}/metrics"
            with urlopen(Request(url, headers={"Authorization": f"Basic {password}"}), timeout=60) as answer:
                found |= set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))
        return found

    def log(self, name: str) -> str:
        return (self.project / f"{name}.log").read_text()

    def _words(self, words: list[str]) -> list[str]:
        found = [self._here(word.replace("$$", "$")) for word in words]
        start = {"agl": [sys.executable, "-m", "agl"], "python": [sys.executable]}[found[0]]
        return [*start, *found[1:]]

    def _here(self, word: str) -> str:
        return re.sub("|".join(map(re.escape, self._changes)), lambda found: self._changes[found[0]], word)

    def _environment(self, service: dict[str, Any]) -> dict[str, str]:
        values: dict[str, str] = service.get("environment", {})
        secret = re.compile(r"\$\{(\w+):\?.*\}")
        given = {name: self._here(secret.sub(lambda found: SECRETS[found[1]], text)) for name, text in values.items()}
        return {"PATH": os.environ["PATH"], "HOME": str(self.project / "data"), **given}

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)
        self._opened.close()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture
def models() -> Iterator[ScriptedModelServer]:
    reply = Reply(text="42")
    with ScriptedModelServer(default=reply, models=("small",), api_key=SECRETS["DEPLOY_MODEL_KEY"]) as server:
        yield server


@pytest.fixture
def services(project: Path, port: int, models: ScriptedModelServer) -> Iterator[Services]:
    file = project / "experiment.toml"
    file.write_text(file.read_text().replace("http://models.example/v1", f"{models.url}/v1"))
    (project / "deploy_agent.py").write_text(f"import asyncio\nimport os\nimport pathlib\n\n{HOLDING}")
    done = deploy("compose", "experiment.toml", folder=project)
    assert 0 == done.returncode, done.stderr
    services = Services(project, port)
    try:
        yield services
    finally:
        services.stop()


def test_the_services_run_the_experiment_to_its_end_though_a_worker_is_killed(services: Services) -> None:
    data = services.project / "data"
    shown = {name for file in MONITORING.iterdir() for name in re.findall(r"\bagl_[a-z_]+\b", file.read_text())}
    assert len(shown) > 8
    for name in ("gateway", "console"):
        services.start(name)
        wait_until(lambda name=name: services.is_healthy(name), every_s=0.2)
    workers = [services.start(f"worker-{number}", "worker") for number in (1, 2)]
    trainer = services.start("trainer")
    wait_until(lambda: services.is_healthy("trainer"), every_s=0.2)
    assert services.is_healthy("worker")
    assert services.metrics() >= shown

    wait_until(lambda: 2 == len(list(data.glob("began-*"))), every_s=0.05)
    workers[0].send_signal(signal.SIGKILL)
    workers[0].wait()
    (data / "go").touch()

    assert 0 == trainer.wait(300), services.log("trainer")
    assert "validation reward: 1.000 before, 1.000 after" in services.log("trainer")
    assert 0 == workers[1].wait(60), services.log("worker-2")
    assert (data / "runs").is_dir()
    assert not (services.project / "runs").exists()
