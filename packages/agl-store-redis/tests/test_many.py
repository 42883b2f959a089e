"""Concurrent claims, writes and removals: no rollout is given twice or forgotten, and no read sees half a change."""

import asyncio

import pytest
from msgspec.structs import replace

from agl.contracts import RolloutQuery
from agl.errors import NotFoundError
from agl.schemas import Rollout
from agl.stores import all_spans
from agl_store_redis import writer
from agl_store_redis.connections import connect
from agl_store_redis.loading import begin
from agl_store_redis.store import RedisStore
from agl_store_redis.urls import target_of
from agl_store_sqlite.sql.needs import Needs
from agl_testing.stores.samples import make_call, make_rollout, make_span, outcome_of

from .conftest import Server


def test_objects_that_claim_at_once_get_each_rollout_once(url: str) -> None:
    """Each object has a separate thread and connection, so the scripts interleave as with separate processes."""

    async def drain(store: RedisStore, name: str) -> list[str]:
        taken: list[str] = []
        while claims := await store.claim(worker=name, wait_s=1.0):
            taken += [claim.rollout.rollout_id for claim in claims]
            await store.finish([outcome_of(claim, spans=[make_span(claim)]) for claim in claims])
        return taken

    async def body() -> None:
        stores = [RedisStore(url) for _ in range(4)]
        asked = [rollout.rollout_id for rollout in await stores[0].enqueue([make_rollout() for _ in range(100)])]
        workers = [asyncio.create_task(drain(stores[at % 4], f"w{at}")) for at in range(12)]
        for _ in range(20):
            asked += [rollout.rollout_id for rollout in await stores[0].enqueue([make_rollout() for _ in range(5)])]
        taken = [each for part in await asyncio.gather(*workers) for each in part]
        assert sorted(asked) == sorted(taken)
        rollouts = await stores[0].rollouts(RolloutQuery())
        assert {("succeeded", 1)} == {(rollout.status, rollout.attempts) for rollout in rollouts}
        for store in stores:
            await store.close()

    asyncio.run(body())


@pytest.mark.long
async def test_queued_rollout_that_a_dead_claimer_took_is_given_to_who_waits(url: str) -> None:
    """A machine dies between the two scripts of a claim."""

    store = RedisStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=None, experiment="e")])
    dying = connect(target_of(url))
    loaded = begin(dying, target_of(url).base, [Needs(queue=(None, 1))])
    assert ["a"] == loaded.rows.queues[None]
    dying.close()
    assert [] == await store.claim(worker="w")
    assert ["queued"] == [rollout.status for rollout in await store.rollouts(RolloutQuery())]
    (claim,) = await store.claim(worker="w", wait_s=60, experiment="e")
    assert "a.1" == claim.attempt.attempt_id
    await store.close()


async def test_transaction_that_met_another_one_is_repeated_on_what_is_there_by_then(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program appends a span and finishes the attempt during the transaction."""

    store, other = RedisStore(url), RedisStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    (claim,) = await store.claim(worker="w")
    call = make_call(range(50), range(5))

    def meeting(server, base, needs, **options):
        loaded = begin(server, base, needs, **options)
        if meetings:
            asyncio.run_coroutine_threadsafe(meetings.pop()(), loop).result(60)
        return loaded

    meetings = [
        lambda: other.finish([outcome_of(claim, spans=[make_span(claim, name="three")])]),
        lambda: other.append_spans([make_span(claim, name="one", call=call)]),
    ]
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(writer, "begin", meeting)
    write = other.backend._writer._act  # type: ignore[attr-defined]  # the other one is not disturbed
    monkeypatch.setattr(write, "_begin", lambda needs: _undisturbed(write, needs))
    await store.append_spans([make_span(claim, name="two", call=call)])
    spans = await all_spans(store, "a")
    assert [("one", 1, False), ("three", 2, False), ("two", 3, True)] == [
        (span.name, span.sequence, span.is_late) for span in spans
    ]
    assert [call, None, call] == [span.call for span in spans]
    await store.close()
    await other.close()


def _undisturbed(write, needs):
    return write._repeated(lambda server: begin(server, write._target.base, needs))


async def test_reads_while_others_remove_see_whole_rollouts_or_none(url: str) -> None:
    store, other = RedisStore(url), RedisStore(url)
    until = asyncio.Event()

    async def churn() -> None:
        for _ in range(60):
            await other.enqueue([make_rollout() for _ in range(3)])
            claims = await other.claim(worker="w", limit=3)
            await other.finish([outcome_of(claim, spans=[make_span(claim)]) for claim in claims])
            await other.delete([claim.rollout.rollout_id for claim in claims])
        until.set()

    churning = asyncio.create_task(churn())
    seen = 0
    while not until.is_set():
        for recording in await store.recordings(RolloutQuery(), spans="all"):
            seen += 1
            assert len(recording.attempts) == recording.rollout.attempts
            assert recording.rollout.status != "succeeded" or 1 == len(recording.spans)
    await churning
    assert seen
    with pytest.raises(NotFoundError):
        await store.spans("nobody")
    await store.close()
    await other.close()


def test_removed_rollouts_leave_nothing_in_the_servers_memory(server: Server, url: str) -> None:
    base = f"{{{url.partition('prefix=')[2]}}}:"

    async def body() -> None:
        store = RedisStore(url)
        for _ in range(2):
            await store.enqueue([make_rollout(experiment="e", group_id="g") for _ in range(5)])
            claims = await store.claim(worker="w", limit=5, claim_id="c")
            await store.append_spans([make_span(claim) for claim in claims])
            await store.finish([outcome_of(claim, spans=[make_span(claim)]) for claim in claims])
            await store.delete([claim.rollout.rollout_id for claim in claims])
        assert 0 == await store.count_rollouts(RolloutQuery())
        assert [] == await store.changes()
        assert 50 == await store.cursor()
        await store.close()

    asyncio.run(body())
    assert [f"{base}feed", f"{base}meta"] == sorted(key.decode() for key in server.run("KEYS", f"{base}*"))


async def test_spans_of_ten_megabytes_and_gaps_in_sequences_are_read_in_pages(url: str) -> None:
    store = RedisStore(url)
    await store.enqueue([Rollout(rollout_id="a", task=None)])
    (claim,) = await store.claim(worker="w")
    spans = [make_span(claim, name=str(at)) for at in range(40)]
    for span in spans[:2]:
        span.attributes["text"] = "é" * 5_000_000
    await store.append_spans(spans[:20])
    await store.append_spans([replace(span, sequence=100 + at) for at, span in enumerate(spans[20:])])
    read = await store.spans("a")
    assert [str(at) for at in range(40)] == [span.name for span in read]
    assert [*range(1, 21), *range(100, 120)] == [span.sequence for span in read]
    assert [span.attributes for span in spans] == [span.attributes for span in read]
    for after, first in ((4, "4"), (19, "19"), (20, "20"), (50, "20"), (99, "20"), (100, "21"), (118, "39")):
        assert first == (await store.spans("a", after=after, limit=1))[0].name
    assert [] == await store.spans("a", after=119)
    await store.close()


async def test_lists_are_ordered_by_bytes_whatever_the_servers_locale(url: str) -> None:
    names = ["B", "a", "Z", "ä", "é", "z", "中", "😀", "a-b", "a.b", "aB"]

    store = RedisStore(url)
    for name in names:
        await store.enqueue([Rollout(rollout_id=name, task=None, experiment=f"e{len(name)}", created_at=5.0)])
    for sort in ("rollout_id", "created_at"):
        for is_newest_first in (False, True):
            query = RolloutQuery(sort=sort, is_newest_first=is_newest_first, status=("queued",), limit=3)
            found: list[str] = []
            while page := await store.rollouts(query):
                found += [rollout.rollout_id for rollout in page]
                query = query.next(page[-1])
            assert sorted(names, reverse=is_newest_first) == found
    await store.close()
