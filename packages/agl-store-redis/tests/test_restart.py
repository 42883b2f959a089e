"""``kill -9`` of the server during a run: acknowledged writes remain, and workers continue after the restart."""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from agl.contracts import RolloutQuery
from agl.errors import StoreError
from agl.schemas import Rollout
from agl_store_redis import connections, scripts, writing
from agl_store_redis.store import RedisStore
from agl_testing.stores.samples import make_span, outcome_of
from agl_testing.waiting import eventually, wait_until
from tests.restarts import ONE_ATTEMPT, disturbed

from .conftest import Server


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.soak)])
def test_work_goes_on_after_the_server_was_killed_and_the_log_has_a_line_but_no_traceback(
    server: Server, url: str, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    def restart() -> None:
        server.kill()
        server.start()

    asyncio.run(disturbed(lambda: RedisStore(url), restart, rounds=rounds))
    assert "waiting callers are not woken by changes in" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("seed", "rounds"), [(1, 20), pytest.param(2, 300, marks=pytest.mark.soak)])
def test_connections_that_are_cut_at_random_lose_and_repeat_nothing(
    server: Server, url: str, seed: int, rounds: int
) -> None:
    draw = random.Random(seed)

    def cut() -> None:
        time.sleep(draw.uniform(0.0, 0.02))
        server.run("CLIENT", "KILL", "TYPE", draw.choice(["normal", "pubsub"]), "SKIPME", "yes")

    asyncio.run(disturbed(lambda: RedisStore(url), cut, rounds=rounds))


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_answer_that_was_lost_with_the_connection_is_found_again(
    url: str, monkeypatch: pytest.MonkeyPatch, is_lost_before: bool
) -> None:
    """The connection breaks just before or after the commit; the result is the same, with one attempt per rollout."""
    breaks = iter([True])

    def breaking(server: connections.Server, name: str, base: str, *args: bytes | str | int | float) -> object:
        is_breaking = next(breaks, False)
        if is_breaking and is_lost_before:
            server.run("CLIENT", "KILL", "ID", server.run("CLIENT", "ID"), "SKIPME", "no")
        answer = scripts.call(server, name, base, *args)
        if is_breaking:
            raise ConnectionError("the connection is closed")
        return answer

    async def body() -> None:
        store = RedisStore(url)
        nonlocal breaks
        await store.enqueue([Rollout(rollout_id=f"r{at}", task=at, retry=ONE_ATTEMPT) for at in range(3)])
        monkeypatch.setattr(writing, "call", breaking)
        breaks = iter([True])
        claims = await store.claim(worker="w", limit=2)
        assert ["r0.1", "r1.1"] == [claim.attempt.attempt_id for claim in claims]
        breaks = iter([True])
        await store.append_spans([make_span(claims[0])])
        breaks = iter([True])
        assert ["succeeded"] == [each.status for each in await store.finish([outcome_of(claims[0])])]
        assert 1 == len(await store.spans("r0"))
        breaks = iter([True])
        assert 1 == await store.delete(["r0"])
        assert ["r1", "r2"] == [each.rollout_id for each in await store.rollouts(RolloutQuery())]
        statuses = [change.status for change in await store.changes() if change.key == "r1"]
        assert ["queued", "running"] == statuses
        await store.close()

    asyncio.run(body())


class Service:
    """A port that forwards new connections to one server at a time, like a host name; open connections stay."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._joined = 0

    async def start(self) -> int:
        self._listener = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return self._listener.sockets[0].getsockname()[1]

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.server.port)
        self._joined += 1
        await asyncio.gather(self._pass_on(reader, there[1]), self._pass_on(there[0], writer))
        self._joined -= 1

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def stop(self) -> None:
        """Stop listening, and wait until all connections are closed."""
        self._listener.close()
        await eventually(lambda: not self._joined)


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    """Start a primary and a replica."""
    with ExitStack() as started:
        primary, replica = (Server(repl_diskless_sync_delay="0") for _ in range(2))
        for each in (primary, replica):
            started.callback(each.remove)
        replica.run("REPLICAOF", "127.0.0.1", primary.port)
        wait_until(lambda: replica.run("INFO", "replication")["master_link_status"] == "up")
        yield primary, replica


def test_store_goes_to_the_new_primary_when_its_own_becomes_a_replica(pair: tuple[Server, Server]) -> None:
    primary, replica = pair

    def exchange() -> None:
        assert 1 == primary.run("WAIT", 1, 10_000)
        replica.run("REPLICAOF", "NO", "ONE")
        primary.run("REPLICAOF", "127.0.0.1", 1)  # so that what is read from it is old

    async def body() -> None:
        service = Service(primary)
        port = await service.start()
        store = await asyncio.to_thread(RedisStore, f"redis://127.0.0.1:{port}/0")
        await store.enqueue([Rollout(rollout_id="a", task=None)])
        waiting = asyncio.create_task(store.changes(after=await store.cursor(), wait_s=300))
        await asyncio.to_thread(exchange)
        writing = asyncio.create_task(store.enqueue([Rollout(rollout_id="b", task=None)]))
        await asyncio.sleep(0.3)
        assert not writing.done()
        service.server = replica
        await writing
        assert ["a", "b"] == [each.rollout_id for each in await store.rollouts(RolloutQuery())]
        begin = time.monotonic()
        assert ["b"] == [change.key for change in await waiting]
        assert time.monotonic() - begin < 60
        assert ["a", "b"] == [claim.rollout.rollout_id for claim in await store.claim(worker="w", limit=2)]
        await store.close()
        await service.stop()

    asyncio.run(body())
    assert b"2" == replica.run("HGET", "{agl}:meta", "seq")


async def test_primary_that_stays_a_replica_is_named(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = pair
    for module in ("agl_store_sqlite.sql.servers", "agl_store_redis.writer"):
        monkeypatch.setattr(f"{module}.RESTART_WAIT_S", 0.5)

    store = RedisStore(primary.url())
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    replica.run("REPLICAOF", "NO", "ONE")
    primary.run("REPLICAOF", "127.0.0.1", replica.port)
    calls = [store.enqueue([Rollout(rollout_id=f"r{at}", task=None)]) for at in range(60)]
    begin = time.monotonic()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - begin < 15, "calls that wait together wait once"
    assert {(StoreError, True)} == {(type(each), "is a replica; name the primary" in str(each)) for each in answers}
    await store.close()


def test_closed_store_leaves_no_mark_of_its_writer(server: Server, url: str) -> None:
    async def body() -> None:
        store = RedisStore(url)
        await store.enqueue([Rollout(rollout_id="a", task=None)])
        assert 1 == len(marks())
        await store.close()

    def marks() -> list[bytes]:
        return server.run("KEYS", f"{{{url.partition('prefix=')[2]}}}:w/*")

    asyncio.run(body())
    assert [] == marks()


@pytest.mark.long
def test_server_that_stays_away_is_named_and_closing_does_not_wait_for_it(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("agl_store_sqlite.sql.servers", "agl_store_redis.writer"):
        monkeypatch.setattr(f"{module}.RESTART_WAIT_S", 1.0)

    async def body() -> None:
        store = RedisStore(url)
        await store.enqueue([Rollout(rollout_id="a", task=None)])
        await asyncio.to_thread(server.stop)
        try:
            with pytest.raises(StoreError, match="cannot be reached"):
                await store.enqueue([Rollout(rollout_id="b", task=None)])
            with pytest.raises(StoreError, match="cannot be reached"):
                await store.cursor()
            for module in ("agl_store_sqlite.sql.servers", "agl_store_redis.writer"):
                monkeypatch.setattr(f"{module}.RESTART_WAIT_S", 300.0)
            waiting = asyncio.create_task(store.claim(worker="w", wait_s=300))
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            await store.close()
            with pytest.raises(StoreError):
                await waiting
            assert time.monotonic() - begin < 100, "closing ends every wait for the server"
        finally:
            await asyncio.to_thread(server.start)

    asyncio.run(body())
