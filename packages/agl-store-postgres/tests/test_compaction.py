"""The space of removed rollouts is used again."""

import asyncio
import random

from agl.schemas import Rollout
from agl_run.sql import Compaction
from agl_store_postgres.store import PostgresStore


def test_space_of_removed_rollouts_is_used_again(url: str) -> None:
    async def body() -> None:
        store = PostgresStore(url)
        sizes = [await write_and_remove(store, f"round-{number}") for number in range(6)]
        assert all(size.before > 1 << 20 for size in sizes)
        assert sizes[-1].before < 2 * sizes[0].before
        assert sizes[-1].after < 2 * sizes[0].before
        await store.close()

    asyncio.run(body())


async def write_and_remove(store: PostgresStore, name: str) -> Compaction:
    """Write and remove a megabyte."""
    noise = random.Random(name)
    tasks = [{"text": noise.randbytes(1000).hex()} for _ in range(400)]
    made = await store.enqueue([Rollout(rollout_id=f"{name}-{n}", task=task) for n, task in enumerate(tasks)])
    ids = [rollout.rollout_id for rollout in made]
    await store.cancel(ids)
    await store.delete(ids)
    return await store.compact()
