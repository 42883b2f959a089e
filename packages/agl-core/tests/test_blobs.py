"""Stores drop blobs that no span refers to after a while, by the store's own clock."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from agl.contracts import Store
from agl.schemas import Blob
from agl.stores import MemoryStore
from agl.stores import _blobs as stored
from agl_store_sqlite import SQLiteStore
from agl_testing.stores.samples import finish_one, make_blob, make_call, make_span, outcome_of, start_one


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Callable[[], Store]:
    url = f"sqlite:///{tmp_path}/runs.db"
    return lambda: MemoryStore(clock=clock) if request.param == "memory" else SQLiteStore(url, clock=clock)


async def left_after(store: Store, clock: Clock, blobs: Sequence[Blob], seconds: float) -> list[Blob]:
    """Return the blobs that are left after some time, when a rollout is deleted that never referred to them."""
    clock.now += seconds
    done = await finish_one(store)
    await store.delete([done.rollout_id])
    return await store.blobs([blob.digest for blob in blobs])


async def test_blob_without_a_span_stays_for_an_hour(make: Callable[[], Store], clock: Clock) -> None:
    store, blob = make(), make_blob("a")
    await store.save_blobs([blob])
    assert [blob] == await left_after(store, clock, [blob], 3600)
    assert [] == await left_after(store, clock, [blob], 601)
    await store.close()


async def test_blob_that_is_saved_again_stays_for_another_hour(make: Callable[[], Store], clock: Clock) -> None:
    store, blob = make(), make_blob("a")
    await store.save_blobs([blob])
    clock.now += 3500
    await store.save_blobs([blob])
    assert [blob] == await left_after(store, clock, [blob], 3600)
    assert [] == await left_after(store, clock, [blob], 601)
    await store.save_blobs([blob])
    assert [blob] == await left_after(store, clock, [blob], 0)
    await store.close()


async def test_delete_works_past_checks_that_are_not_settled_yet(
    make: Callable[[], Store], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "CHECKED", 2)

    store, old, early = make(), make_blob("old"), [make_blob("early"), make_blob("first")]
    await store.save_blobs(early)
    clock.now += 100
    await store.save_blobs([old])
    clock.now += 3000
    await store.save_blobs(early)
    clock.now += 1300
    assert [] == await left_after(store, clock, [old], 0)
    assert early == await store.blobs([each.digest for each in early])
    await store.close()


async def test_delete_settles_a_bounded_number_of_checks_and_its_own_first(
    make: Callable[[], Store], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "CHECKED", 2)
    monkeypatch.setattr(stored, "SWEPT", 2)

    store, own, orphans = make(), make_blob("own"), [make_blob(f"orphan {at}") for at in range(5)]
    await store.save_blobs([*orphans, own])
    claim = await start_one(store)
    call = replace(make_call(range(3), range(3)), inputs=(own.digest,))
    (done,) = await store.finish([outcome_of(claim, spans=[make_span(claim, call=call)])])
    clock.now += 4300
    await store.delete([done.rollout_id])
    assert [] == await store.blobs([own.digest])
    assert 4 <= len(await store.blobs([each.digest for each in orphans]))
    for _ in range(3):
        await left_after(store, clock, [], 0)
    assert [] == await store.blobs([each.digest for each in orphans])
    await store.close()
