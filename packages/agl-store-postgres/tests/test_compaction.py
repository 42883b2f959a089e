"""The space of removed rollouts is reused."""

import random

from agl.contracts import RolloutQuery
from agl.schemas import Rollout
from agl_store_postgres.store import PostgresStore
from agl_store_sqlite.sql.compaction import Compaction


async def test_space_of_removed_rollouts_is_used_again(url: str) -> None:
    store = PostgresStore(url)
    sizes = [await write_and_remove(store, f"round-{number}") for number in range(6)]
    assert all(size.before > 1 << 20 for size in sizes)
    assert sizes[-1].before < 2 * sizes[0].before
    assert sizes[-1].after < 2 * sizes[0].before
    await store.close()


async def write_and_remove(store: PostgresStore, name: str) -> Compaction:
    """Write and remove a megabyte, and return the result of the compaction."""
    noise = random.Random(name)
    tasks = [{"text": noise.randbytes(1000).hex()} for _ in range(400)]
    made = await store.enqueue([Rollout(rollout_id=f"{name}-{n}", task=task) for n, task in enumerate(tasks)])
    ids = [rollout.rollout_id for rollout in made]
    await store.cancel(ids)
    await store.delete(ids)
    return await store.compact()


async def test_size_follows_what_is_recorded_and_a_vacuum_returns_its_space(url: str) -> None:
    store = PostgresStore(url)
    empty = await store.size()
    noise = random.Random(0)
    tasks = [{"text": noise.randbytes(1000).hex()} for _ in range(400)]
    ids = [f"r-{number:03}" for number in range(400)]
    await store.enqueue([Rollout(rollout_id=i, task=task) for i, task in zip(ids, tasks, strict=True)])
    await store.cancel(ids)
    full = await store.size()
    assert full - empty > 400 * 2_000
    assert await store.delete(ids[:300]) == 300
    left = await store.size()
    assert 0.2 < (left - empty) / (full - empty) < 0.3
    done = await store.vacuum()
    assert done.after < done.before - 300 * 2_000
    assert ids[300:] == [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]
    await store.close()
