"""Automatic retention on PostgreSQL: what a run removes, and how several servers take turns."""

import asyncio
from pathlib import Path

import agl
from agl.contracts import RolloutQuery
from agl.schemas import Outcome, Rollout
from agl_inspect.retention import RetentionLimits, retaining
from agl_run import Quiet, RetentionConfig
from agl_store_postgres.store import PostgresStore
from agl_testing.waiting import eventually


async def fill(store: PostgresStore, count: int) -> None:
    """Record finished rollouts in the order of their numbers."""
    for number in range(count):
        await store.enqueue([Rollout(rollout_id=f"e-{number}", task={}, experiment="e")])
        (claim,) = await store.claim(worker="w")
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])


async def ids_in(store: PostgresStore) -> list[str]:
    return [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]


def test_run_removes_rollouts_of_earlier_runs(url: str, tmp_path: Path) -> None:
    for _ in range(2):
        store = PostgresStore(url)
        trainer = agl.Trainer(
            name="e", store=store, folder=tmp_path, progress=Quiet(), gateway="none", retention=RetentionConfig(keep=0)
        )
        trainer.fit(lambda task: 1.0, val_dataset=[{"n": 0}], fresh=True)
        asyncio.run(store.close())

    async def left() -> list[str]:
        store = PostgresStore(url)
        try:
            return await ids_in(store)
        finally:
            await store.close()

    assert ["e-2"] == [rollout_id[:3] for rollout_id in asyncio.run(left())]


async def test_servers_of_one_database_remove_in_turns_and_keep_the_newest(url: str) -> None:
    first, second, said = PostgresStore(url), PostgresStore(url), list[str]()
    await fill(first, 30)
    limits = RetentionLimits(keep=4)
    async with retaining(first, limits, say=said.append), retaining(second, limits, say=said.append):
        await eventually(lambda: bool(said))
    assert ["retention: removed 26 old rollouts; new ones take their space"] == said
    assert [f"e-{number}" for number in range(26, 30)] == sorted(await ids_in(first))
    await first.close()
    await second.close()
