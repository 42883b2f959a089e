"""The feed that wakes waiters for finished rollouts."""

import asyncio

import pytest

from agl.errors import StoreError
from agl.stores import MemoryStore
from agl_run.run.finish_feed import FinishFeed


def test_who_asks_after_the_store_broke_gets_its_error() -> None:
    asyncio.run(_ask_after_the_store_broke())


async def _ask_after_the_store_broke() -> None:
    store = MemoryStore()
    async with FinishFeed(store) as feed:
        with feed.watch(["early"]) as early:
            await store.close()
            with pytest.raises(StoreError):
                await asyncio.wait_for(early.take(1), 5.0)
        with pytest.raises(StoreError), feed.watch(["late"]):
            pass
