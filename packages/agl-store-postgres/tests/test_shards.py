"""A sharded store: where spans are, which databases belong together, and what an interrupted write leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from agl.contracts import RolloutQuery
from agl.errors import ConfigError, NotFoundError, StoreError
from agl.schemas import Rollout
from agl_store_postgres import shard_writer
from agl_store_postgres.sharded_store import ShardedPostgresStore
from agl_store_postgres.store import PostgresStore
from agl_store_postgres.urls import DatabaseTarget, sharded_target_of
from agl_testing.stores.samples import make_call, make_span, outcome_of
from agl_testing.waiting import eventually

IDS = [f"r{number:02}" for number in range(24)]


def rows(target: DatabaseTarget, query: str, *values: object) -> list[Any]:
    with psycopg.connect(target.conninfo, autocommit=True) as db:
        cursor = db.execute(query.replace("SCHEMA", target.schema).encode(), values)
        return cursor.fetchall() if cursor.description else []


def spans_on(url: str) -> list[int]:
    """Return the number of spans on each shard, in the order of the URL."""
    return [rows(shard, "SELECT count(*) FROM SCHEMA.spans")[0][0] for shard in sharded_target_of(url).shards]


def turned(url: str) -> str:
    """Return the URL with the shards in reverse order."""
    base, _, shards = url.partition("shards=")
    return f"{base}shards={','.join(reversed(shards.split(',')))}"


async def record(store: ShardedPostgresStore, ids: list[str]) -> None:
    """Run rollouts with three spans each, the last of which is sent with the outcome."""
    await store.enqueue([Rollout(rollout_id=rollout_id, task=1) for rollout_id in ids])
    claims = await store.claim(worker="w", limit=len(ids))
    assert ids == [claim.rollout.rollout_id for claim in claims]
    await store.append_spans([make_span(claim, name=name) for claim in claims for name in ("one", "two")])
    await store.finish([outcome_of(claim, spans=[make_span(claim, name="last")]) for claim in claims])


async def names(store: ShardedPostgresStore, rollout_id: str) -> list[str]:
    return [span.name for span in await store.spans(rollout_id)]


async def test_spans_of_a_rollout_are_on_the_shard_that_its_row_names(sharded_url: Callable[..., str]) -> None:
    url = sharded_url(3)

    store, other = ShardedPostgresStore(url), ShardedPostgresStore(turned(url))
    await record(store, IDS[:12])
    await record(other, IDS[12:])
    for rollout_id in IDS:
        assert ["one", "two", "last"] == await names(store, rollout_id) == await names(other, rollout_id)
    placed = dict(rows(sharded_target_of(url).control, "SELECT seq, shard FROM SCHEMA.rollouts"))
    assert {1, 2, 3} == set(placed.values())
    for number, shard in enumerate(sharded_target_of(url).shards, start=1):
        held = {seq for (seq,) in rows(shard, "SELECT DISTINCT attempt >> 14 FROM SCHEMA.spans")}
        assert {seq for seq, place in placed.items() if place == number} == held
    assert 72 == sum(spans_on(url))
    assert [] == rows(sharded_target_of(url).control, "SELECT 1 FROM SCHEMA.spans")
    await store.close()
    await other.close()


async def test_shard_that_is_added_gets_new_rollouts_alone(sharded_url: Callable[..., str]) -> None:
    url = sharded_url(3)
    old_url = url.rpartition(",")[0]

    old = ShardedPostgresStore(old_url)
    await record(old, IDS[:8])
    before = spans_on(old_url)
    store = ShardedPostgresStore(turned(url))
    assert [*before, 0] == spans_on(url)
    await store.enqueue([Rollout(rollout_id=rollout_id, task=1) for rollout_id in IDS[8:]])
    seen = await old.claim(worker="old", limit=100)
    left = await store.claim(worker="new", limit=100)
    assert IDS[8:] == sorted(claim.rollout.rollout_id for claim in (*seen, *left))
    assert left, "the shard that was added got none"
    await store.append_spans([make_span(claim, name="one") for claim in (*seen, *left)])
    assert [len(left)] == spans_on(url)[2:]
    for claim in seen:
        assert ["one"] == await names(old, claim.rollout.rollout_id)
    with pytest.raises(StoreError, match=r"on shard 3, .*_3, which this process's store URL does not name"):
        await old.spans(left[0].rollout.rollout_id)
    with pytest.raises(StoreError, match="on shard 3"):
        await old.append_spans([make_span(left[0])])
    await old.append_spans([make_span(seen[0], name="two")])
    for rollout_id in IDS[:8]:
        assert ["one", "two", "last"] == await names(store, rollout_id)
    await old.close()
    await store.close()
    with pytest.raises(ConfigError, match=r"does not name shard 3, last at .*_3, which holds rollouts"):
        ShardedPostgresStore(old_url)


def test_databases_that_do_not_belong_together_are_refused(sharded_url: Callable[..., str], url: str) -> None:
    first, second = sharded_url(2, name="a"), sharded_url(1, name="b")

    def refusal(url: str, kind: Callable[[str], object] = ShardedPostgresStore) -> str:
        with pytest.raises((StoreError, ConfigError)) as caught:
            kind(url)
        return str(caught.value)

    for each in (first, second):
        asyncio.run(ShardedPostgresStore(each).close())
    base, _, shards = first.partition("shards=")
    shard = shards.split(",")[0]
    assert "a shard of another store" in refusal(f"{second},{shard}")
    assert "names one shard twice" in refusal(f"{first},{shard.replace('127.0.0.1', 'localhost')}")
    control = base.replace("+shards", "").rstrip("&")
    assert "holds a store of its own" in refusal(f"{first},{control}")
    assert "postgresql+shards" in refusal(control, PostgresStore)
    assert "is a shard of a store" in refusal(shard, PostgresStore)
    asyncio.run(fill(url))
    message = refusal(f"{url.replace('postgresql:', 'postgresql+shards:', 1)}&shards={url}_1")
    assert "agl data copy postgresql://" in message
    assert "cannot become the control server" in message


async def fill(url: str) -> None:
    store = PostgresStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=1)])
    await store.close()


async def test_shard_whose_address_leads_elsewhere_is_refused_in_mid_run(sharded_url: Callable[..., str]) -> None:
    url = sharded_url(1)

    store = ShardedPostgresStore(url)
    await record(store, ["a"])
    (shard,) = sharded_target_of(url).shards
    rows(shard, "UPDATE SCHEMA.agl_shard SET identity = 'other'")
    others = "application_name = 'agl' AND pid <> pg_backend_pid()"
    rows(shard, f"SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE {others}")
    with pytest.raises(StoreError, match="is not shard 1 of this store any more"):
        await store.spans("a")
    await store.close()


class BrokenOffError(Exception):
    """Raised to interrupt a write, as if the machine stopped."""


@pytest.mark.parametrize("is_finish", [False, True])
async def test_write_that_breaks_off_between_the_servers_leaves_nothing_to_see(
    sharded_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch, is_finish: bool
) -> None:
    commit = shard_writer.commit

    def breaking(*args: Any, **kwargs: Any) -> None:
        raise BrokenOffError

    url = sharded_url(2)

    store, other = ShardedPostgresStore(url), ShardedPostgresStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=1)])
    (claim,) = await store.claim(worker="w")
    await store.append_spans([make_span(claim, name="one", call=make_call(range(99), range(9)))])
    second = make_span(claim, name="two", call=make_call(range(120), range(9)))
    monkeypatch.setattr(shard_writer, "commit", breaking)
    write = store.finish([outcome_of(claim, spans=[second])]) if is_finish else store.append_spans([second])
    with pytest.raises(BrokenOffError):
        await write
    monkeypatch.setattr(shard_writer, "commit", commit)
    assert 2 == sum(spans_on(url)), "the shard has what the control server never named"
    assert ["one"] == await names(other, "a")
    assert ["running"] == [each.status for each in await other.attempts("a")]
    third = make_span(claim, name="three")
    await other.append_spans([third, second])
    assert ["one", "three", "two"] == await names(store, "a")
    assert 3 == sum(spans_on(url))
    await store.finish([outcome_of(claim)])
    (statistics,) = await store.statistics()
    assert (2, 99 + 120) == (statistics.calls, statistics.prompt_tokens)
    await store.close()
    await other.close()


async def test_writer_that_was_frozen_between_the_servers_removes_nothing_of_others(
    sharded_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen writer continues after the control server gave the locks to another writer, which has written."""
    url = sharded_url(1)
    load = shard_writer.ShardWriter._load
    rival: list[Callable[[], None]] = []

    def frozen(self: Any, db: Any, *args: Any) -> None:
        while rival:
            act = rival.pop()
            with psycopg.connect(sharded_target_of(url).control.conninfo, autocommit=True) as person:
                person.execute("SELECT pg_terminate_backend(%s, 2000)", (db.info.backend_pid,))
            act()
        load(self, db, *args)

    store, other = ShardedPostgresStore(url), ShardedPostgresStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=1)])
    (claim,) = await store.claim(worker="w")
    await store.append_spans([make_span(claim, name="one")])
    monkeypatch.setattr(shard_writer.ShardWriter, "_load", frozen)
    loop = asyncio.get_running_loop()
    both = [make_span(claim, name="two"), make_span(claim, name="three")]
    rival.append(lambda: asyncio.run_coroutine_threadsafe(other.append_spans(both), loop).result(60))
    await store.append_spans([make_span(claim, name="late")])
    assert ["one", "two", "three", "late"] == await names(store, "a")
    await store.close()
    await other.close()


async def test_spans_of_removed_rollouts_leave_their_shards(sharded_url: Callable[..., str]) -> None:
    url = sharded_url(2)

    store = ShardedPostgresStore(url)
    await record(store, IDS[:10])
    size = await store.size()
    assert 6 == await store.delete(IDS[:6])
    await eventually(lambda: sum(spans_on(url)) == 12)
    with pytest.raises(NotFoundError):
        await store.spans(IDS[0])
    assert size > await store.size()
    assert ["one", "two", "last"] == await names(store, IDS[9])
    assert [] == rows(sharded_target_of(url).control, "SELECT 1 FROM SCHEMA.removals")
    assert 1 == await store.delete(IDS[6:7])
    await store.close()
    assert 9 == sum(spans_on(url))


async def test_shard_that_is_older_than_the_control_server_is_named(sharded_url: Callable[..., str]) -> None:
    url = sharded_url(1)

    store = ShardedPostgresStore(url)
    await record(store, ["a", "b"])
    rows(sharded_target_of(url).shards[0], "DELETE FROM SCHEMA.spans WHERE attempt >> 14 = 1 AND sequence = 3")
    with pytest.raises(StoreError, match="lacks spans of rollout 'a', up to sequence 3"):
        await store.spans("a")
    assert ["one", "two", "last"] == await names(store, "b")
    assert 1 == await store.delete(["a"])
    await store.close()


async def test_control_server_that_is_older_than_its_shards_goes_on(sharded_url: Callable[..., str]) -> None:
    """After a backup is restored, the control server gives out numbers that already have spans on a shard."""
    url = sharded_url(1)
    control = sharded_target_of(url).control

    store = ShardedPostgresStore(url)
    await record(store, ["a"])
    await store.enqueue([Rollout(rollout_id="b", task=1)])
    (claim,) = await store.claim(worker="w")
    await store.append_spans([make_span(claim, name="forgotten") for _ in range(4)])
    for table, key in (("span_marks", "attempt"), ("attempts", "id"), ("changes", "attempt")):
        rows(control, f"DELETE FROM SCHEMA.{table} WHERE {key} >> 14 = 2")
    rows(control, "DELETE FROM SCHEMA.rollouts WHERE seq = 2")
    rows(control, "SELECT setval(pg_get_serial_sequence('SCHEMA.rollouts', 'seq'), 1)")
    await record(store, ["c"])
    assert ["one", "two", "last"] == await names(store, "c") == await names(store, "a")
    copied = await store.recordings(RolloutQuery(ids=("c",)), spans="all")
    rows(control, "SELECT setval(pg_get_serial_sequence('SCHEMA.rollouts', 'seq'), 2)")
    await store.close()
    assert ["last", "one", "two"] == sorted(span.name for span in copied[0].spans)


async def test_recordings_come_back_into_shards(sharded_url: Callable[..., str]) -> None:
    first, second = sharded_url(3, name="a"), sharded_url(2, name="b")

    store, other = ShardedPostgresStore(first), ShardedPostgresStore(second)
    await record(store, IDS)
    taken = await store.recordings(RolloutQuery(), spans="all")
    assert IDS == await other.restore(taken)
    assert taken == await other.recordings(RolloutQuery(), spans="all")
    assert await store.statistics() == await other.statistics()
    assert all(spans_on(second))
    await store.close()
    await other.close()
