"""``kill -9`` of the server during a run: acknowledged writes remain, and workers continue after the restart."""

import asyncio
import random
import time
from typing import Any

import psycopg
import pytest

from agl.contracts import RolloutQuery
from agl.errors import StoreError
from agl.schemas import Rollout
from agl_store_postgres import connections
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import make_span, outcome_of
from tests.restarts import ONE_ATTEMPT, check, disturbed, work


def test_work_goes_on_after_the_server_was_killed(server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_store_sqlite.sql.servers.LOOK_S", 60.0)  # who is woken need not look

    def restart() -> None:
        server.kill()
        server.start()

    asyncio.run(disturbed(lambda: PostgresStore(url), restart, rounds=3))


@pytest.mark.parametrize(("seed", "cuts"), [(1, 40), pytest.param(2, 500, marks=pytest.mark.soak)])
async def test_connections_that_are_cut_at_random_lose_and_repeat_nothing(
    server, url: str, seed: int, cuts: int
) -> None:
    draw = random.Random(seed)

    def cut(number: int) -> None:
        with server.connect() as other:
            for _ in range(number):
                time.sleep(draw.uniform(0.0, 0.1))
                other.execute(
                    "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity "
                    "WHERE application_name = 'agl' ORDER BY random() LIMIT 1) AS one"
                )

    stores = [PostgresStore(f"{url}&readers=2") for _ in range(3)]
    until, done = asyncio.Event(), list[str]()
    workers = [
        asyncio.create_task(work(store, f"{at}{number}", until, done))
        for at, store in enumerate(stores)
        for number in range(3)
    ]
    await asyncio.to_thread(cut, cuts)
    until.set()
    await asyncio.gather(*workers)
    assert len(done) > 9
    await check(stores[0], done)
    for store in stores:
        await store.close()


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_answer_that_was_lost_with_the_connection_is_found_again(
    url: str, monkeypatch: pytest.MonkeyPatch, is_lost_before: bool
) -> None:
    """The connection breaks just before or after the commit; the result is the same, with one attempt per rollout."""
    from agl_store_postgres import writer

    commit = writer.commit
    breaks = iter([True])

    def breaking(db: connections.Connection, changes: object, **settings: Any) -> None:
        is_breaking = next(breaks, False)
        if is_breaking and is_lost_before:
            end_of(db)
        commit(db, changes, **settings)  # type: ignore[arg-type]
        if is_breaking and not is_lost_before:
            db.close()
            raise psycopg.OperationalError("the connection is closed")

    def end_of(db: connections.Connection) -> None:
        with psycopg.connect(url.partition("?")[0], autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 2000)", (db.info.backend_pid,))

    async def body() -> None:
        store = PostgresStore(url)
        rollouts = [Rollout(rollout_id=f"r{at}", task=at, retry=ONE_ATTEMPT) for at in range(3)]
        nonlocal breaks
        await store.enqueue(rollouts)
        monkeypatch.setattr(writer, "commit", breaking)
        breaks = iter([True])
        claims = await store.claim(worker="w", limit=2)
        assert ["r0.1", "r1.1"] == [claim.attempt.attempt_id for claim in claims]
        breaks = iter([True])
        await store.append_spans([make_span(claims[0])])
        breaks = iter([True])
        assert ["succeeded"] == [each.status for each in await store.finish([outcome_of(claims[0])])]
        breaks = iter([True])
        assert 1 == await store.delete(["r0"])
        assert ["r1", "r2"] == [each.rollout_id for each in await store.rollouts(RolloutQuery())]
        statuses = [change.status for change in await store.changes() if change.key == "r1"]
        assert ["queued", "running"] == statuses
        await store.close()

    asyncio.run(body())


def test_transaction_that_a_crash_undid_is_not_mistaken_for_one_that_got_its_id(
    server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies before the commit, and reuses the lost transaction ids before the writer reconnects."""
    from agl_store_postgres import writer

    commit = writer.commit
    breaks = iter([False])

    def crashing(db: connections.Connection, changes: object, **settings: Any) -> None:
        if next(breaks, False):
            server.kill()
            server.start()
            with server.connect() as other:
                for _ in range(200):
                    other.execute("SELECT pg_current_xact_id()")
        commit(db, changes, **settings)  # type: ignore[arg-type]

    async def body() -> None:
        store = PostgresStore(url)
        nonlocal breaks
        await store.enqueue([Rollout(rollout_id=f"r{at}", task=at, retry=ONE_ATTEMPT) for at in range(3)])
        monkeypatch.setattr(writer, "commit", crashing)
        breaks = iter([True])
        claims = await store.claim(worker="w", limit=2)
        assert ["r0.1", "r1.1"] == [claim.attempt.attempt_id for claim in claims]
        assert ["running", "running"] == [each.status for each in await store.rollouts(RolloutQuery(ids=("r0", "r1")))]
        breaks = iter([True])
        assert ["succeeded"] == [each.status for each in await store.finish([outcome_of(claims[0])])]
        assert ["succeeded"] == [each.status for each in await store.rollouts(RolloutQuery(ids=("r0",)))]
        await store.close()
        with server.connect() as other:
            assert [] == other.execute(f"SELECT key FROM {url.partition('schema=')[2]}.documents").fetchall()

    asyncio.run(body())


async def test_server_that_stays_away_is_named_and_closing_does_not_wait_for_it(
    server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_store_sqlite.sql.servers.RESTART_WAIT_S", 1.0)

    store = PostgresStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    await asyncio.to_thread(server.stop)
    try:
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.enqueue([Rollout(rollout_id="b", task=None)])
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.cursor()
        monkeypatch.setattr("agl_store_sqlite.sql.servers.RESTART_WAIT_S", 30.0)
        waiting = asyncio.create_task(store.claim(worker="w", wait_s=30))
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        await store.close()
        with pytest.raises(StoreError):
            await waiting
        assert time.monotonic() - begin < 20
    finally:
        await asyncio.to_thread(server.start)
