"""The store behind PgBouncer, where each transaction may run in another session of the server."""

import asyncio
import itertools
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from agl.errors import ConfigError
from agl.schemas import Rollout
from agl_store_postgres.store import PostgresStore
from agl_store_postgres.urls import target_of
from agl_testing.conformance import StoreLocation
from agl_testing.stores.samples import finish_one
from agl_testing.waiting import eventually, wait_until

from . import test_conformance
from .conftest import SERVER_USER, Server
from .test_restart import check, work

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed: apt-get install pgbouncer")

SESSIONS = 3
"""The number of sessions with the server, which is lower than the stores' number of connections."""

_numbers = itertools.count(1)


class Pooler:
    """PgBouncer in front of a server, with few sessions."""

    def __init__(self, server: Server, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        folder.chmod(0o755)
        self._file = folder / "pgbouncer.ini"
        self._file.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port} dbname=postgres user=open\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {SESSIONS}\nmax_client_conn = 200\nserver_login_retry = 1\n"
            "server_reset_query = DISCARD ALL\nserver_reset_query_always = 1\nquery_wait_timeout = 60\n"
        )
        self._log = folder / "log"
        with self._log.open("wb") as log:
            command = [PROGRAM or "", str(self._file)]
            self._process = subprocess.Popen(command, user=SERVER_USER, stdout=log, stderr=log)
        wait_until(self._answers)

    def fresh_url(self) -> str:
        """Return a URL with a schema that no test has used."""
        schema = f"pooled_{next(_numbers)}"
        return f"postgresql://open@127.0.0.1:{self.port}/postgres?schema={schema}&pool=transaction"

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(30)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            psycopg.connect(f"postgresql://open@127.0.0.1:{self.port}/postgres").close()
        except psycopg.OperationalError:
            return False
        return True


@pytest.fixture(scope="module")
def pooler(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooler]:
    folder = tmp_path_factory.mktemp("pooler")
    for parent in folder.parents[:3]:
        parent.chmod(0o755)  # PgBouncer runs as another user
    pooler = Pooler(server, folder)
    yield pooler
    pooler.stop()


@pytest.fixture
def pooled_url(pooler: Pooler) -> str:
    return pooler.fresh_url()


def test_pool_is_checked() -> None:
    with pytest.raises(ConfigError, match="must be session, or transaction"):
        target_of("postgresql://host/database?pool=statement")


@pytest.mark.soak
class TestPooledStore(test_conformance.TestPostgresStore):
    """The store passes the conformance class behind a pooler; all of these tests are long."""

    @pytest.fixture
    def locate(self, pooled_url: str) -> Callable[[str], StoreLocation]:
        def located(name: str) -> StoreLocation:
            url = pooled_url.replace("&pool", f"_{name}&pool")
            return StoreLocation(factory="agl_store_postgres.store:PostgresStore", url=url)

        return located


async def test_work_goes_on_behind_the_pooler_though_the_server_is_killed(server: Server, pooled_url: str) -> None:
    stores = [PostgresStore(pooled_url) for _ in range(3)]
    until, done = asyncio.Event(), list[str]()
    workers = [
        asyncio.create_task(work(store, f"{at}{number}", until, done))
        for at, store in enumerate(stores)
        for number in range(2)
    ]
    with server.connect() as db:
        await eventually(lambda: len(done) >= 20)
        row = db.execute("SELECT count(*) FROM pg_stat_activity WHERE usename = 'open'").fetchone()
    assert row is not None
    assert 1 <= int(str(row[0])) <= SESSIONS
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    before = len(done)
    await eventually(lambda: len(done) >= before + 8)
    until.set()
    await asyncio.gather(*workers)
    await check(stores[0], done)
    for store in stores:
        await store.close()


async def test_waiting_callers_are_woken_through_the_pooler(pooled_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_store_sqlite.sql.servers.LOOK_S", 600.0)  # who is woken need not look

    waiter, other = PostgresStore(pooled_url), PostgresStore(pooled_url)
    last = await waiter.cursor()
    claiming = asyncio.create_task(waiter.claim(worker="w", wait_s=600))
    watching = asyncio.create_task(waiter.changes(after=last, wait_s=600))
    await asyncio.sleep(0.5)
    started = time.monotonic()
    await other.enqueue([Rollout(rollout_id="late", task=None)])
    assert ["late"] == [claim.rollout.rollout_id for claim in await claiming]
    assert await watching
    assert time.monotonic() - started < 30
    await waiter.close()
    await other.close()


async def test_days_begin_and_end_through_the_pooler(pooled_url: str) -> None:
    store, target = PostgresStore(f"{pooled_url}&partition=day"), target_of(pooled_url)
    ids: list[str] = []
    for _ in range(3):
        ids.append((await finish_one(store, spans=2)).rollout_id)
        with psycopg.connect(target.conninfo, autocommit=True) as db:
            db.execute(f"UPDATE {target.schema}.partitioning SET began_at = now() - interval '1 day'".encode())
    await store.delete(ids[:1])
    await store.compact()
    with psycopg.connect(target.conninfo, autocommit=True) as db:
        rows = db.execute(f"SELECT tableoid::regclass::text FROM {target.schema}.spans".encode()).fetchall()
    assert [f"{target.schema}.spans_{day}" for day in (2, 2, 3, 3)] == [name for (name,) in rows]
    assert [2, 2] == [len(await store.spans(rollout_id)) for rollout_id in ids[1:]]
    await store.close()


async def test_space_is_given_back_through_the_pooler(pooled_url: str) -> None:
    store = PostgresStore(pooled_url)
    await store.enqueue([Rollout(rollout_id="r", task=None)])
    assert (await store.compact()).after > 0
    assert (await store.vacuum()).after > 0
    assert await store.size() > 0
    await store.close()
