"""A shard goes away: its spans wait, everything else continues, and no acknowledged write is lost."""

import asyncio
import random
import time
from collections import defaultdict

import pytest

from agl.contracts import RolloutQuery
from agl.errors import StoreError
from agl.schemas import Claim, RetryPolicy, Rollout
from agl_store_postgres.sharded_store import ShardedPostgresStore
from agl_testing.stores.samples import make_call, make_span, outcome_of
from agl_testing.waiting import eventually

ONE_ATTEMPT = RetryPolicy(max_attempts=1, max_losses=0)


async def claims_by_shard(store: ShardedPostgresStore, count: int = 12) -> dict[int, list[Claim]]:
    """Enqueue and claim rollouts; return the claims by the number of the shard."""
    await store.enqueue([Rollout(rollout_id=f"r{number}", task=1) for number in range(count)])
    found: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in await store.claim(worker="w", limit=count, lease_s=600):
        found[store.place(claim.rollout.rollout_id)].append(claim)
    assert {1, 2} == found.keys()
    return found


async def test_shard_that_is_away_holds_up_its_own_spans_alone(
    two_servers_url: str, shard_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardedPostgresStore(two_servers_url)
    claims = await claims_by_shard(store)
    await store.append_spans([make_span(each[0], name="before") for each in claims.values()])
    await asyncio.to_thread(shard_server.stop)
    try:
        begin = time.monotonic()
        waiting = asyncio.create_task(store.append_spans([make_span(claims[2][0], name="waits")]))
        for number in range(20):
            await store.append_spans([make_span(claims[1][0], name=str(number))])
            assert await store.renew([claim.attempt.attempt_id for claim in claims[2]])
        await store.finish([outcome_of(claims[1][1], spans=[make_span(claims[1][1], name="last")])])
        await store.finish([outcome_of(claims[2][1], status="failed")])  # without spans
        assert 21 == len(await store.spans(claims[1][0].rollout.rollout_id))
        assert 2 == await store.count_rollouts(RolloutQuery(status=("succeeded", "failed")))
        assert time.monotonic() - begin < 15
        assert not waiting.done()
    finally:
        await asyncio.to_thread(shard_server.start)
    await waiting
    assert ["before", "waits"] == [span.name for span in await store.spans(claims[2][0].rollout.rollout_id)]
    mixed = [make_span(claims[2][0], name="after"), make_span(claims[1][0], name="after")]
    await store.append_spans(mixed)
    await store.close()


async def test_shard_that_stays_away_is_named(
    two_servers_url: str, shard_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_store_postgres.shard_writer.RESTART_WAIT_S", 1.0)
    monkeypatch.setattr("agl_store_postgres._shard_reads.SHARD_WAIT_S", 1.0)
    monkeypatch.setattr("agl_store_postgres.sweeping.START_WAIT_S", 0.2)
    monkeypatch.setattr("agl_store_postgres.sharded_store.START_WAIT_S", 0.2)

    store = ShardedPostgresStore(two_servers_url)
    claims = await claims_by_shard(store)
    done = [claim.rollout.rollout_id for claim in claims[2]]
    await store.finish([outcome_of(claim, spans=[make_span(claim)]) for claim in claims[2]])
    await asyncio.to_thread(shard_server.stop)
    address = f"127.0.0.1:{shard_server.port}"
    try:
        for write in (store.append_spans([make_span(claims[2][0])]), store.spans(done[0])):
            with pytest.raises(StoreError, match="cannot be reached") as caught:
                await write
            assert address in str(caught.value)
        assert len(done) == await store.delete(done)
        await store.close()
        with pytest.raises(StoreError, match=address):
            ShardedPostgresStore(two_servers_url)
    finally:
        await asyncio.to_thread(shard_server.start)
    store = ShardedPostgresStore(two_servers_url)
    await eventually(lambda: _spans_of(shard_server, two_servers_url) == 0)  # it removes what the delete named
    await store.close()


def _spans_of(shard_server, url: str) -> int:
    with shard_server.connect() as db:
        ((count,),) = db.execute(f"SELECT count(*) FROM {url.rpartition('=')[2]}.spans").fetchall()
    return int(count)


async def work(store: ShardedPostgresStore, name: str, until: asyncio.Event, done: list[str]) -> None:
    """Run rollouts one after the other; a rollout whose attempt was lost would fail."""
    number = 0
    while not until.is_set():
        number += 1
        rollout_id = f"{name}-{number}"
        await store.enqueue([Rollout(rollout_id=rollout_id, task=number, experiment=name, retry=ONE_ATTEMPT)])
        (claim,) = await store.claim(worker=name, experiment=name, wait_s=30, lease_s=600)
        for turn in range(3):
            await store.append_spans([make_span(claim, name=str(turn), call=make_call(range(40 + 9 * turn), range(9)))])
        await store.finish([outcome_of(claim, spans=[make_span(claim, name="last")])])
        done.append(rollout_id)


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
async def test_shard_killed_under_load_loses_and_repeats_nothing(
    two_servers_url: str, shard_server, kills: int
) -> None:
    draw = random.Random(kills)

    stores = [ShardedPostgresStore(two_servers_url) for _ in range(2)]
    until, done = asyncio.Event(), list[str]()
    workers = [
        asyncio.create_task(work(store, f"{at}{number}", until, done))
        for at, store in enumerate(stores)
        for number in range(4)
    ]
    for _ in range(kills):
        before = len(done)
        await eventually(lambda count=before + 12: len(done) >= count)
        await asyncio.sleep(draw.uniform(0.0, 0.05))
        await asyncio.to_thread(shard_server.kill)
        await asyncio.to_thread(shard_server.start)
    before = len(done)
    await eventually(lambda: len(done) >= before + 12)
    until.set()
    await asyncio.gather(*workers)
    rollouts = await stores[0].rollouts(RolloutQuery(ids=tuple(done)))
    assert {("succeeded", 1)} == {(rollout.status, rollout.attempts) for rollout in rollouts}
    for rollout_id in done:
        spans = await stores[1].spans(rollout_id)
        assert ["0", "1", "2", "last"] == [span.name for span in spans]
        assert [make_call(range(40 + 9 * turn), range(9)).prompt_ids for turn in range(3)] == [
            span.call.prompt_ids for span in spans if span.call is not None
        ]
    statistics = await stores[0].statistics()
    assert 3 * len(done) == sum(each.calls for each in statistics)
    for store in stores:
        await store.close()
