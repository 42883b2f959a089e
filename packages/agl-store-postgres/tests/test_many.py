"""Many store objects at once, as on many machines: changes have one order, and no caller notices a collision."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from agl.contracts import Change, RolloutQuery
from agl.schemas import Outcome, PromptTemplate, ResourceVersion, RetryPolicy, Rollout, Span
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import make_call, make_rollout, make_span, outcome_of

WRITERS = 6
EACH = 25


def rollout(rollout_id: str, **fields: object) -> Rollout:
    return Rollout(rollout_id=rollout_id, task={"q": rollout_id}, **fields)  # type: ignore[arg-type]


def test_reader_of_the_feed_misses_no_change_of_many_writers(url: str) -> None:
    async def write(store: PostgresStore, number: int) -> None:
        for at in range(EACH):
            await store.enqueue([rollout(f"{number}-{at}")])
            (claim,) = await store.claim(worker=str(number), wait_s=60)  # another claim may hold what there is now
            await store.append_spans([make_span(claim)])
            await store.finish([outcome_of(claim)])

    async def follow(store: PostgresStore, is_over: asyncio.Event) -> list[Change]:
        seen: list[Change] = []
        while True:
            was_over = is_over.is_set()
            page = await store.changes(after=seen[-1].cursor if seen else 0, limit=7, wait_s=0.2)
            seen += page
            if was_over and not page:
                return seen

    async def body() -> None:
        stores = [PostgresStore(url) for _ in range(WRITERS)]
        reader = PostgresStore(url)
        is_over = asyncio.Event()
        following = asyncio.create_task(follow(reader, is_over))
        await asyncio.gather(*(write(store, number) for number, store in enumerate(stores)))
        is_over.set()
        seen = await following
        everything = await reader.changes(limit=100_000)
        assert everything == seen
        assert 4 * WRITERS * EACH == len(everything)
        lives = {change.key: [] for change in everything}
        for change in everything:
            lives[change.key].append(change.status if change.kind == "rollout" else change.kind)
        assert {("queued", "running", "spans", "succeeded")} == {tuple(life) for life in lives.values()}
        for store in [*stores, reader]:
            await store.close()

    asyncio.run(body())


async def test_objects_that_open_an_empty_database_at_once_make_one_schema(url: str) -> None:
    stores: list[PostgresStore] = []
    threads = [threading.Thread(target=lambda: stores.append(PostgresStore(url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 8 == len(stores)
    for at, store in enumerate(stores):
        await store.enqueue([rollout(str(at))])
    assert 8 == await stores[0].cursor()
    for store in stores:
        await store.close()


async def test_writes_that_collide_are_repeated_until_they_pass(url: str) -> None:
    """Two writers add the same records in opposite order, so that they collide or wait for each other."""

    one, two = PostgresStore(url), PostgresStore(url)
    for number in range(12):
        versions = [
            ResourceVersion(name=f"{at}", version=f"{number}", resource=PromptTemplate(template="t")) for at in range(8)
        ]
        rollouts = [rollout(f"{number}-{at}") for at in range(8)]
        await asyncio.gather(one.publish(versions), two.publish(versions[::-1]))
        await asyncio.gather(one.enqueue(rollouts), two.enqueue(rollouts[::-1]))
    assert 12 * 8 == len(await one.rollouts(RolloutQuery()))
    assert 12 * 16 == await two.cursor() == len(await one.changes())
    await one.close()
    await two.close()


def test_claims_of_many_objects_never_overlap_and_leave_nothing(url: str) -> None:
    async def drain(store: PostgresStore) -> list[str]:
        taken: list[str] = []
        while claims := await store.claim(worker="w", limit=3, wait_s=0.5):
            taken += [claim.rollout.rollout_id for claim in claims]
        return taken

    async def body() -> None:
        stores = [PostgresStore(url) for _ in range(WRITERS)]
        asked = await stores[0].enqueue([make_rollout() for _ in range(200)])
        taken = await asyncio.gather(*(drain(store) for store in stores for _ in range(3)))
        assert sorted(each.rollout_id for each in asked) == sorted(each for part in taken for each in part)
        for store in stores:
            await store.close()

    asyncio.run(body())


async def test_lease_that_another_object_gave_lapses_for_whoever_waits(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_store_sqlite.sql.servers.LOOK_S", 60.0)  # who is woken need not look

    one, two = PostgresStore(url), PostgresStore(url)
    waiting = asyncio.create_task(two.claim(worker="two", wait_s=300, experiment="e"))
    await asyncio.sleep(0.3)
    held = rollout("a", experiment="other", retry=RetryPolicy(max_attempts=2))
    await one.enqueue([held])
    await one.claim(worker="one", lease_s=0.3)
    begin = time.monotonic()
    seen = await two.changes(after=await two.cursor(), wait_s=60)
    assert [("a", "queued")] == [(change.key, change.status) for change in seen]
    assert time.monotonic() - begin < 30, "found by looking now and then, not in time"
    await one.enqueue([rollout("b", experiment="e")])
    assert ["b"] == [claim.rollout.rollout_id for claim in await waiting]
    await one.close()
    await two.close()


def test_commit_wakes_whoever_waits_with_more_open_files_than_select_takes(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agl_store_sqlite.sql.servers.LOOK_S", 60.0)  # who is woken need not look

    async def body() -> None:
        one, two = PostgresStore(url), PostgresStore(url)
        waiting = asyncio.create_task(two.claim(worker="two", wait_s=300))
        await asyncio.sleep(0.5)
        await one.enqueue([rollout("a")])
        begin = time.monotonic()
        assert ["a"] == [claim.rollout.rollout_id for claim in await waiting]
        assert time.monotonic() - begin < 30
        await one.close()
        await two.close()

    with many_open_files(1100):
        asyncio.run(body())
    assert "" == caplog.text


@contextmanager
def many_open_files(count: int) -> Iterator[None]:
    """Hold ``count`` files open, so that the next file to be opened gets a greater number."""
    resource = pytest.importorskip("resource", reason="files are numbered")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * count:
        pytest.skip(f"this system lets a process open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_rollout_that_was_locked_when_a_claim_looked_is_found_later(url: str) -> None:
    """A claim skips locked rollouts, and a machine that dies within a transaction wakes no waiting claim."""

    store = PostgresStore(url)
    await store.enqueue([rollout("a")])
    schema = url.rpartition("=")[2]
    with psycopg.connect(url.partition("?")[0]) as other:
        other.execute(f"SELECT 1 FROM {schema}.rollouts FOR UPDATE".encode())
        assert [] == await store.claim(worker="w")
        waiting = asyncio.create_task(store.claim(worker="w", wait_s=60))
        await asyncio.sleep(0.2)
    begin = time.monotonic()
    assert 1 == len(await waiting)
    assert time.monotonic() - begin < 40
    await store.close()


async def test_spans_of_one_attempt_come_from_two_objects(url: str) -> None:
    gateway, worker = PostgresStore(url), PostgresStore(url)
    await worker.enqueue([rollout("a")])
    (claim,) = await worker.claim(worker="w")
    asked: list[Span] = []
    for turn in range(12):
        span = make_span(claim, name="chat", call=make_call(range(40 + 20 * turn), range(20)))
        await (gateway, worker)[turn % 2].append_spans([span])
        asked.append(span)
    both = [make_span(claim, name=str(at)) for at in range(20)]
    await asyncio.gather(gateway.append_spans(both), worker.append_spans(both[::-1]))
    read = await worker.spans("a")
    assert [span.call for span in asked] == [span.call for span in read[:12]]
    assert list(range(1, 33)) == [span.sequence for span in read]
    assert sorted(span.span_id for span in both) == sorted(span.span_id for span in read[12:])
    await gateway.close()
    await worker.close()


@pytest.mark.parametrize("other", ["cancel", "finish"])
async def test_attempt_is_decided_once_by_two_objects_at_once(url: str, other: str) -> None:
    one, two = PostgresStore(url), PostgresStore(url)
    for number in range(15):
        await one.enqueue([rollout(f"{number}")])
        (claim,) = await one.claim(worker="w")
        rival = two.cancel([f"{number}"]) if other == "cancel" else two.finish([outcome_of(claim, "failed")])
        results = await asyncio.gather(
            one.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")]),
            rival,
            return_exceptions=True,
        )
        (attempt,) = await one.attempts(f"{number}")
        (found,) = await two.rollouts(RolloutQuery(ids=(f"{number}",)))
        assert (attempt.status, found.status) in {
            ("succeeded", "succeeded"),
            ("cancelled", "cancelled"),
            ("failed", "failed"),
        }
        decided = [each for each in await one.changes(limit=1000) if each.key == f"{number}"]
        assert ["queued", "running", found.status] == [change.status for change in decided]
        refused = sum(isinstance(each, Exception) for each in results)
        assert refused == (0 if (other, found.status) == ("cancel", "succeeded") else 1)
    await one.close()
    await two.close()
