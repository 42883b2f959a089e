"""The error messages for a database that cannot be used."""

import asyncio
import os
import socket
import time
import traceback
import warnings
from functools import partial

import psycopg
import pytest

from agl import semconv
from agl.contracts import RolloutQuery
from agl.errors import StoreError
from agl.schemas import Rollout
from agl.stores import is_readable, read_recordings
from agl_store_postgres import connections, writer
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import make_span
from agl_testing.waiting import eventually

from .conftest import Server

SECRET = "hunter2-hunter2"


def refusal(url: str) -> str:
    """Return the error message of opening the store, after checking that the traceback does not show the password."""
    with pytest.raises(StoreError) as caught:
        PostgresStore(url)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_unusable_databases_are_refused_with_a_next_step(server) -> None:
    wrong = server.url_for(user=f"owner:{SECRET}")
    assert "correct user and password" in refusal(wrong)
    assert "owner@127.0.0.1" in refusal(wrong)
    assert "createdb" in refusal(server.url_for("nowhere"))
    assert "createuser" in refusal(server.url_for(user="nobody-here")) or "correct user" in refusal(wrong)
    assert "cannot be resolved" in refusal(f"postgresql://me:{SECRET}@no-such-host.invalid/runs")
    assert "GRANT" in refusal(server.url_for(user="guest:guest"))


def test_server_that_is_not_there_is_waited_for_then_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.monotonic()
    assert "correct host and port" in refusal(f"postgresql://me:{SECRET}@127.0.0.1:{port}/runs")
    assert 3.5 < time.monotonic() - begin < 60


def test_schema_of_another_program_is_left_alone(server) -> None:
    with server.connect() as connection:
        connection.execute("CREATE SCHEMA music")
        connection.execute("CREATE TABLE music.rollouts (title text)")
    message = refusal(f"{server.url_for()}?schema=music")
    assert "another program" in message
    assert "?schema=NAME" in message
    with server.connect() as connection:
        assert [] == connection.execute("SELECT title FROM music.rollouts").fetchall()


def test_database_that_cannot_keep_every_text_is_refused(server) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE narrow ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    assert "--encoding=UTF8" in refusal(server.url_for("narrow"))


def test_user_with_rights_on_the_tables_alone_can_work(server, url: str) -> None:
    schema = url.rpartition("=")[2]
    asyncio.run(PostgresStore(url).close())
    with server.connect() as connection:
        connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO guest")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO guest")
        connection.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO guest")

    async def work() -> None:
        store = PostgresStore(f"{server.url_for(user='guest:guest')}?schema={schema}")
        await store.enqueue([Rollout(rollout_id="a", task=None)])
        assert 1 == len(await store.claim(worker="w"))
        assert 2 == await store.cursor()
        await store.close()

    asyncio.run(work())


async def test_one_failure_in_a_shared_transaction_harms_no_other(url: str) -> None:
    store = PostgresStore(url)
    good = [store.enqueue([Rollout(rollout_id=f"r{at}", task=at)]) for at in range(20)]
    bad = [store.enqueue([Rollout(rollout_id=f"nul-{at}", task=at, group_id="\0")]) for at in range(3)]
    bad.append(store.enqueue([Rollout(rollout_id="half", task=None, group_id="\ud800")]))
    mixed = [*good[:10], *bad, *good[10:]]
    results = await asyncio.gather(*mixed, return_exceptions=True)
    refused = [each for each in results if isinstance(each, StoreError)]
    assert [4, 20] == [len(refused), len(results) - len(refused)]
    assert "0x00" in str(refused[0])
    assert "surrogate" in str(refused[3])
    with pytest.raises(StoreError, match="NUL"):
        await store.attempts("nul\0")
    assert 20 == await store.cursor()
    await store.close()


def cancel_what_waits(person: psycopg.Connection) -> int:
    """Cancel the store's statements that wait for a lock, and return the number of them."""
    found = person.execute(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'agl' "
        "AND wait_event_type = 'Lock'"
    )
    return len(found.fetchall())


async def test_locked_tables_are_waited_for_then_named(url: str) -> None:
    store = PostgresStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    schema = url.rpartition("=")[2]
    with psycopg.connect(url.partition("?")[0]) as other:
        other.execute(f"LOCK TABLE {schema}.rollouts".encode())
        waiting = asyncio.create_task(store.enqueue([Rollout(rollout_id="b", task=None)]))
        with psycopg.connect(url.partition("?")[0], autocommit=True) as person:
            await eventually(partial(cancel_what_waits, person))
        with pytest.raises(StoreError, match="canceling statement"):
            await waiting
    await store.enqueue([Rollout(rollout_id="b", task=None)])
    await store.close()


async def test_calls_that_wait_together_wait_once_for_locked_tables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections._SETTINGS, "lock_timeout", "500ms")

    store = PostgresStore(url)
    with psycopg.connect(url.partition("?")[0]) as other:
        other.execute(f"LOCK TABLE {url.rpartition('=')[2]}.rollouts".encode())
        begin = time.monotonic()
        calls = [store.enqueue([Rollout(rollout_id=f"r{at}", task=at)]) for at in range(60)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - begin < 15.0, "and not 60 times half a second"
    assert {(StoreError, True)} == {(type(each), "holds a lock" in str(each)) for each in answers}
    await store.close()


async def test_calls_that_wait_together_are_not_tried_one_by_one_on_a_server_that_breaks_each_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def breaking(db: connections.Connection, changes: object, **settings: object) -> None:
        tries.append(db.info.backend_pid)
        db.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    store = PostgresStore(url)
    monkeypatch.setattr(writer, "commit", breaking)
    monkeypatch.setattr(writer, "RESTART_WAIT_S", 0.0)
    calls = [store.enqueue([Rollout(rollout_id=f"r{at}", task=at)]) for at in range(10)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {(StoreError, True)} == {(type(each), "cannot be reached" in str(each)) for each in answers}
    assert len(tries) <= 2, "one for the first call, and one for all that came meanwhile"
    await store.close()


async def test_read_that_fails_before_it_reaches_the_server_leaves_no_old_snapshot_behind(url: str) -> None:
    store = PostgresStore(f"{url}&readers=1")
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    with pytest.raises(StoreError, match="surrogate"):
        await store.spans("\ud800")
    await store.enqueue([Rollout(rollout_id="b", task=None)])
    assert ["a", "b"] == [each.rollout_id for each in await store.rollouts(RolloutQuery())]
    await store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_forked_process_is_told_to_open_its_own(url: str) -> None:
    store = PostgresStore(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads running is what is tested
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(store.cursor())
        except StoreError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert 0 == os.waitpid(pid, 0)[1]

    async def go_on() -> None:
        await store.enqueue([Rollout(rollout_id="a", task=None)])
        assert 1 == await store.cursor()
        await store.close()

    asyncio.run(go_on())


@pytest.mark.parametrize("options", ["", "&partition=month"])
async def test_damaged_records_hide_no_others(server: Server, url: str, options: str) -> None:
    store = PostgresStore(url + options)
    await store.enqueue([Rollout(rollout_id=f"ro-{number}", task=number) for number in range(4)])
    claims = await store.claim(worker="w", limit=4)
    await store.append_spans([make_span(claim) for claim in claims for _ in range(3)])
    schema = url.rpartition("=")[2]
    with server.connect() as connection:
        connection.execute(f"UPDATE {schema}.rollouts SET data = '\\xc1' WHERE rollout_id = 'ro-0'")
        own = f"SELECT attempt FROM {schema}.rollouts WHERE rollout_id = 'ro-1'"
        connection.execute(f"UPDATE {schema}.spans SET data = '\\xc1' WHERE sequence = 2 AND attempt = ({own})")
        connection.execute(f"UPDATE {schema}.attempts SET data = '\\xc1' WHERE id = ({own.replace('ro-1', 'ro-2')})")
    for query in (
        RolloutQuery(limit=1),
        RolloutQuery(limit=1, sort="created_at"),
        RolloutQuery(status=("running",)),
    ):
        recordings = [each async for each in read_recordings(store, query, spans="all")]
        assert ["ro-1", "ro-2", "ro-3"] == [each.rollout.rollout_id for each in recordings]
        assert [["work", semconv.UNREADABLE, "work"], *[["work"] * 3] * 2] == [
            [span.name for span in each.spans] for each in recordings
        ]
        assert [False, False, True] == [is_readable(each) for each in recordings]
    await store.close()
