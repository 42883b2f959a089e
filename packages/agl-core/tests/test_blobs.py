"""How long stores hold blobs that no span refers to, by the store's own clock."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agl.contracts import Store
from agl.schemas import Blob
from agl.stores import MemoryStore
from agl_store_sqlite import SQLiteStore
from agl_testing.stores.samples import finish_one, make_blob


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


def test_blob_without_a_span_stays_for_an_hour(make: Callable[[], Store], clock: Clock) -> None:
    async def work() -> None:
        store, blob = make(), make_blob("a")
        await store.save_blobs([blob])
        assert [blob] == await left_after(store, clock, [blob], 3600)
        assert [] == await left_after(store, clock, [blob], 601)
        await store.close()

    asyncio.run(work())


def test_blob_that_is_saved_again_stays_for_another_hour(make: Callable[[], Store], clock: Clock) -> None:
    async def work() -> None:
        store, blob = make(), make_blob("a")
        await store.save_blobs([blob])
        clock.now += 3500
        await store.save_blobs([blob])
        assert [blob] == await left_after(store, clock, [blob], 3600)
        assert [] == await left_after(store, clock, [blob], 601)
        await store.save_blobs([blob])
        assert [blob] == await left_after(store, clock, [blob], 0)
        await store.close()

    asyncio.run(work())
