"""Spans in partitions by time: what begins a partition, what drops one, and what keeps one."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from agl.contracts import Recording, RolloutQuery
from agl.errors import ConfigError, SchemaVersionError, StoreError
from agl.schemas import Rollout
from agl_store_postgres import partitions as parts
from agl_store_postgres.sharded_store import ShardedPostgresStore
from agl_store_postgres.store import PostgresStore
from agl_store_postgres.urls import DatabaseTarget, sharded_target_of, target_of
from agl_testing.stores.samples import finish_one, make_rollout, make_span, start_one
from agl_testing.waiting import eventually

Execute = Callable[..., list[tuple[object, ...]]]


def executing(target: DatabaseTarget) -> Execute:
    """Return a function that runs a statement in the store's schema, on a new connection each time."""

    def execute(statement: str, *values: object) -> list[tuple[object, ...]]:
        with psycopg.connect(target.conninfo, autocommit=True) as connection:
            connection.execute(f"SET search_path = {target.schema}".encode())
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    return execute


def tables_of(execute: Execute) -> list[str]:
    """Return the names of the partitions of the table ``spans``, in order."""
    rows = execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'spans'::regclass")
    return sorted(str(name) for (name,) in rows)


def end_period(execute: Execute) -> None:
    """Make the current period one day older, so that it ends."""
    execute("UPDATE partitioning SET began_at = began_at - interval '1 day'")


async def fill(store: PostgresStore | ShardedPostgresStore, execute: Execute, *, days: int, each: int = 2) -> list[str]:
    """Finish ``each`` rollouts with two spans on each of several days; return the rollout ids, oldest first."""
    ids: list[str] = []
    for _ in range(days):
        ids += [(await finish_one(store, spans=2)).rollout_id for _ in range(each)]
        end_period(execute)
    return ids


async def test_day_whose_rollouts_are_all_removed_loses_its_table_and_others_keep_theirs(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    ids = await fill(store, execute, days=4)
    assert ["spans_1", "spans_2", "spans_3", "spans_4"] == [name for name in tables_of(execute) if name != "spans_0"]
    await store.delete([*ids[:2], ids[2], *ids[4:6]])
    await store.compact()
    assert ["spans_2", "spans_4"] == tables_of(execute)
    assert [(2,)] == execute("SELECT count(*) FROM spans_2")  # the row of the rollout that was removed went alone
    assert [(0,)] == execute("SELECT count(*) FROM removals")
    assert [2, 2, 2] == [len(await store.spans(rollout_id)) for rollout_id in (ids[3], *ids[6:])]
    await store.close()


async def test_removed_rollouts_lose_their_spans_without_being_asked_twice(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_store_postgres.store.QUIET_S", 0.0)  # what opening the store sweeps is done before

    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    ids = await fill(store, execute, days=2)
    await start_one(store)
    await store.delete(ids)
    await eventually(lambda: execute("SELECT count(*) FROM spans") == [(0,)])
    assert {"spans_1", "spans_2"}.isdisjoint(tables_of(execute))
    await store.close()


async def test_size_no_longer_counts_what_was_removed(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    empty = await store.size()
    ids = await fill(store, execute, days=1, each=6)
    full = await store.size()
    await store.delete(ids[:3])
    half = await store.size()
    assert 0.4 < (half - empty) / (full - empty) < 0.6
    await store.delete(ids[3:])
    assert await store.size() < half
    await store.close()


async def test_late_spans_reach_the_day_of_their_rollout_at_the_first_try(url: str, server) -> None:
    log = server.folder / "log"
    before = log.read_text().count("duplicate key")

    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    old = await start_one(store)
    silent = await start_one(store)
    end_period(execute)
    new = await start_one(store)
    await store.append_spans([make_span(new, name="new")])
    await store.append_spans([make_span(old, name="first"), make_span(new, name="newer")])
    await store.append_spans([make_span(silent, name="late")])
    again = make_span(old, name="second")
    for number in range(2):
        await store.append_spans([make_span(new, name=str(number))])
        await store.append_spans([again])
    await store.append_spans([again, make_span(new, name="newest")])
    assert ["first", "second"] == [span.name for span in await store.spans(old.rollout.rollout_id)]
    assert ["new", "newer", "0", "1", "newest"] == [span.name for span in await store.spans(new.rollout.rollout_id)]
    assert ["late"] == [span.name for span in await store.spans(silent.rollout.rollout_id)]
    assert [(3,), (5,)] == [*execute("SELECT count(*) FROM spans_1"), *execute("SELECT count(*) FROM spans_2")]
    assert before == log.read_text().count("duplicate key")
    await store.close()


async def test_clock_that_is_set_back_begins_a_period_and_loses_nothing(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    first = await finish_one(store, spans=1)
    execute("UPDATE partitioning SET began_at = began_at + interval '40 days'")  # as if it had been ahead
    second = await finish_one(store, spans=1)
    third = await finish_one(store, spans=1)
    assert [(1, 1), (2, 2)] == execute("SELECT seq >> 32, count(*) FROM rollouts GROUP BY 1 ORDER BY 1")
    for rollout in (first, second, third):
        assert 1 == len(await store.spans(rollout.rollout_id))
    assert await store.rollouts(RolloutQuery()) == await store.rollouts(RolloutQuery(sort="created_at"))
    await store.close()


async def test_store_without_partitions_gets_them_and_keeps_its_spans_as_the_first(url: str) -> None:
    store = PostgresStore(url)
    done = await finish_one(store, spans=2)
    running = await start_one(store)
    await store.append_spans([make_span(running, name="before")])
    recorded = await store.recordings(RolloutQuery(), spans="all")
    await store.close()
    store, execute = PostgresStore(f"{url}&partition=week"), executing(target_of(url))
    assert recorded == await store.recordings(RolloutQuery(), spans="all")
    await store.append_spans([make_span(running, name="after")])
    assert ["before", "after"] == [span.name for span in await store.spans(running.rollout.rollout_id)]
    await finish_one(store, spans=3)
    assert [("spans_0", 4), ("spans_1", 3)] == execute(
        "SELECT tableoid::regclass::text, count(*) FROM spans GROUP BY 1 ORDER BY 1"
    )
    await store.delete([done.rollout_id])
    await store.compact()
    assert [(2,)] == execute("SELECT count(*) FROM spans_0")
    await store.close()


async def test_other_unit_and_newer_partitions_are_refused(url: str) -> None:
    await PostgresStore(f"{url}&partition=day").close()
    with pytest.raises(ConfigError, match=r"partition = 'week' .* is partitioned by day; write partition=day"):
        PostgresStore(f"{url}&partition=week")
    await PostgresStore(url).close()
    executing(target_of(url))("UPDATE partitioning SET version = version + 1")
    with pytest.raises(SchemaVersionError, match=r"partitions of .* have version 2"):
        PostgresStore(url)


async def test_partition_in_use_is_left_for_the_next_time_and_holds_nobody_up(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    ids = await fill(store, execute, days=1)
    await finish_one(store, spans=1)
    with psycopg.connect(target_of(url).conninfo) as reader:
        reader.execute(f"SELECT count(*) FROM {target_of(url).schema}.spans".encode())  # and goes on reading
        await store.delete(ids)
        begun = time.monotonic()
        await store.size()
        assert time.monotonic() - begun < 20
        assert "spans_1" in tables_of(execute)
        assert [(0,)] == execute("SELECT count(*) FROM spans_1")
        await finish_one(store, spans=1)
    await store.compact()
    assert "spans_1" not in tables_of(execute)
    await store.close()


async def test_transaction_that_may_still_add_rollouts_to_a_day_keeps_its_table(url: str) -> None:
    store, execute, target = PostgresStore(f"{url}&partition=day"), executing(target_of(url)), target_of(url)
    (done,) = [await finish_one(store, spans=1)]
    with psycopg.connect(target.conninfo) as frozen:
        frozen.execute(f"SET search_path = {target.schema}".encode())
        ((number,),) = frozen.execute("SELECT agl_numbers(1)").fetchall()
        end_period(execute)
        await finish_one(store, spans=1)
        await store.delete([done.rollout_id])
        await store.compact()
        assert number >> parts.PERIOD_BITS == 1
        assert "spans_1" in tables_of(execute)
    await store.compact()
    assert "spans_1" not in tables_of(execute)
    await store.close()


async def test_dropped_table_comes_back_for_a_rollout_that_was_made_meanwhile(url: str) -> None:
    """This happens if a rollout gets its number on the day on which the table for that number is dropped."""

    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    first = await start_one(store)
    await store.append_spans([make_span(first, name="one")])
    execute("SELECT agl_drop_partition(1)")
    await store.append_spans([make_span(first, name="two")])
    assert ["two"] == [span.name for span in await store.spans(first.rollout.rollout_id)]
    await store.close()


MAKER = """
import asyncio, sys
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import finish_one

async def body():
    store = PostgresStore(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(5):
        print((await finish_one(store, spans=2)).rollout_id, flush=True)
    await store.close()

asyncio.run(body())
"""


async def test_processes_that_begin_a_day_at_once_make_one_table(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    await finish_one(store, spans=1)
    command = [sys.executable, "-c", MAKER, url]
    makers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for maker in makers:
        assert maker.stdout is not None
        assert "ready\n" == maker.stdout.readline()
    end_period(execute)
    ids = [line for maker in makers for line in maker.communicate("go\n", timeout=200)[0].split()]
    assert 15 == len(ids)
    assert [(1, 1), (2, 15)] == execute("SELECT seq >> 32, count(*) FROM rollouts GROUP BY 1 ORDER BY 1")
    assert [(30,)] == execute("SELECT count(*) FROM spans_2")
    for rollout_id in ids:
        assert 2 == len(await store.spans(rollout_id))
    await store.close()


async def test_transactions_that_begin_a_day_at_once_begin_one(url: str) -> None:
    store, execute, target = PostgresStore(f"{url}&partition=day"), executing(target_of(url)), target_of(url)
    end_period(execute)

    def draw(connection: "psycopg.Connection[tuple[object, ...]]") -> int:
        connection.execute(f"SET search_path = {target.schema}".encode())
        ((number,),) = connection.execute("SELECT agl_numbers(1)").fetchall()
        return int(str(number))

    with psycopg.connect(target.conninfo) as one, psycopg.connect(target.conninfo) as two:
        first = draw(one)
        second = asyncio.create_task(asyncio.to_thread(draw, two))
        waiting = f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {two.info.backend_pid}"
        await eventually(lambda: execute(waiting) == [("Lock",)])
        one.commit()
        assert [2, 2] == [first >> parts.PERIOD_BITS, await second >> parts.PERIOD_BITS]
        assert first < await second
    await store.close()


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.soak)])
async def test_server_killed_while_days_begin_and_end_loses_nothing(url: str, server, kills: int) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    execute("UPDATE partitioning SET unit = 'microseconds'")
    until, kept, gone = asyncio.Event(), list[str](), list[str]()

    async def work() -> None:
        while not until.is_set():
            ids = [(await finish_one(store, spans=2)).rollout_id for _ in range(2)]
            await store.delete(ids[:1])
            gone.append(ids[0])
            kept.append(ids[1])

    async def tidy() -> None:
        while not until.is_set():
            with_trouble = await asyncio.gather(store.size(), return_exceptions=True)
            assert isinstance(with_trouble[0], int | StoreError)

    tasks = [asyncio.create_task(each) for each in (work(), tidy())]
    for _ in range(kills):
        before = len(kept)
        await eventually(lambda count=before + 3: len(kept) >= count)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    until.set()
    await asyncio.gather(*tasks)
    for rollout_id in kept:
        assert 2 == len(await store.spans(rollout_id))
    await store.compact()
    assert [(2 * len(kept),)] == execute("SELECT count(*) FROM spans")
    assert len(tables_of(execute)) <= len(kept) + 2
    await store.close()


async def test_shards_drop_tables_by_themselves(sharded_url: Callable[..., str]) -> None:
    url = sharded_url(2)
    target = sharded_target_of(url)
    store, execute = ShardedPostgresStore(f"{url}&partition=day"), executing(target.control)
    shards = [executing(shard) for shard in target.shards]
    ids = await fill(store, execute, days=3, each=6)
    late = await start_one(store)
    await store.append_spans([make_span(late)])
    days = {f"spans_{day + 1}": {store.place(each) for each in ids[6 * day : 6 * day + 6]} for day in range(3)}
    for place, shard in enumerate(shards, start=1):
        assert {name for name, places in days.items() if place in places} == set(tables_of(shard)) & set(days)
    on_first = [rollout_id for rollout_id in ids[6:12] if store.place(rollout_id) == 1]
    await store.delete([*ids[:6], *on_first])
    await store.compact()
    assert ["spans_2" in tables_of(shard) for shard in shards] == [False, len(on_first) < 6]
    assert not any("spans_1" in tables_of(shard) for shard in shards)
    for rollout_id in set(ids[6:]) - set(on_first):
        assert 2 == len(await store.spans(rollout_id))
    assert 1 == len(await store.spans(late.rollout.rollout_id))
    await store.close()


async def test_shard_that_is_added_is_partitioned_too(sharded_url: Callable[..., str]) -> None:
    store = ShardedPostgresStore(f"{sharded_url(1)}&partition=day")
    done = [await finish_one(store, spans=1)]
    await store.close()
    url = sharded_url(2)
    store = ShardedPostgresStore(url)
    done += [await finish_one(store, spans=1) for _ in range(24)]  # so that each shard gets one
    assert {1, 2} == {store.place(rollout.rollout_id) for rollout in done[1:]}
    assert ["spans_0", "spans_1"] == tables_of(executing(sharded_target_of(url).shards[1]))
    for rollout in done:
        assert 1 == len(await store.spans(rollout.rollout_id))
    await store.close()


async def test_user_who_owns_no_table_begins_and_ends_days(server) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE granted")
    url = server.url_for("granted")
    as_guest = server.url_for("granted", user="guest:guest")

    await PostgresStore(f"{url}?partition=day").close()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("GRANT USAGE ON SCHEMA agl TO guest")
        for kind in ("TABLES", "SEQUENCES", "FUNCTIONS"):
            owner.execute(f"GRANT ALL ON ALL {kind} IN SCHEMA agl TO guest".encode())
    store, execute = PostgresStore(as_guest), executing(target_of(url))
    ids = await fill(store, execute, days=2)
    await finish_one(store, spans=1)
    await store.delete(ids)
    await store.size()
    assert {"spans_1", "spans_2"}.isdisjoint(tables_of(execute))
    assert "spans_3" in tables_of(execute)
    await store.close()


async def test_dump_of_a_partitioned_store_comes_back_and_goes_on(server, binaries: Path, tmp_path: Path) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE days")
        connection.execute("CREATE DATABASE days_copy")
    dump = tmp_path / "days.dump"

    store, execute = (
        PostgresStore(f"{server.url_for('days')}?partition=day"),
        executing(target_of(server.url_for("days"))),
    )
    ids = await fill(store, execute, days=3)
    command = ["--schema=agl", "--format=custom", f"--file={dump}", server.url_for("days")]
    subprocess.run([binaries / "pg_dump", *command], check=True)
    subprocess.run([binaries / "pg_restore", f"--dbname={server.url_for('days_copy')}", str(dump)], check=True)
    restored, execute = (
        PostgresStore(server.url_for("days_copy")),
        executing(target_of(server.url_for("days_copy"))),
    )
    recordings = await store.recordings(RolloutQuery(), spans="all")
    assert recordings == await restored.recordings(RolloutQuery(), spans="all")
    await finish_one(restored, spans=2)
    assert "spans_4" in tables_of(execute)
    await restored.delete(ids[:4])
    await restored.compact()
    assert {"spans_1", "spans_2"}.isdisjoint(tables_of(execute))
    assert 2 == len(await restored.spans(ids[4]))
    await store.close()
    await restored.close()


async def test_recordings_that_are_restored_lie_in_the_day_of_their_return(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    ids = await fill(store, execute, days=2)
    recordings: list[Recording] = await store.recordings(RolloutQuery(), spans="all")
    await store.delete(ids)
    await store.restore(recordings)
    assert recordings == await store.recordings(RolloutQuery(), spans="all")
    assert [(3, 4)] == execute("SELECT seq >> 32, count(*) FROM rollouts GROUP BY 1")
    await store.close()


async def test_statements_on_spans_plan_over_the_partitions_that_they_need(url: str) -> None:
    """Named bounds spare the planner a look at every partition, which takes longer than the query."""

    store, execute = PostgresStore(f"{url}&partition=day"), executing(target_of(url))
    ids = await fill(store, execute, days=5, each=1)
    with psycopg.connect(target_of(url).conninfo, autocommit=True) as db:
        db.execute(f"SET search_path = {target_of(url).schema}".encode())
        for rollout_id in ids:
            ((seq,),) = db.execute("SELECT seq FROM rollouts WHERE rollout_id = %s", (rollout_id,)).fetchall()
            query = b"EXPLAIN SELECT data FROM spans s WHERE s.sequence = 1" + parts.bounds_of([seq << 14])
            plan = "\n".join(str(line) for (line,) in db.execute(query).fetchall())
            assert f"spans_{seq >> parts.PERIOD_BITS}_pkey" in plan
            assert 1 == plan.count(" on spans_")
    await store.close()


async def test_period_begins_only_with_a_rollout(url: str) -> None:
    store, execute = PostgresStore(f"{url}&partition=month"), executing(target_of(url))
    execute("UPDATE partitioning SET began_at = began_at - interval '400 days'")
    await store.claim(worker="w")
    await store.size()
    assert [(0,)] == execute("SELECT count(*) FROM partitioning WHERE began_at > now() - interval '2 days'")
    (made,) = await store.enqueue([make_rollout()])
    assert isinstance(made, Rollout)
    assert [(1,)] == execute("SELECT count(*) FROM partitioning WHERE began_at > now() - interval '2 days'")
    await store.close()
