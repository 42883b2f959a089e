"""Rollouts that lost many workers run alone, so that they cannot take other rollouts down with a worker."""

import asyncio

from agl.contracts import RolloutQuery
from agl.schemas import Claim, ErrorInfo, Outcome, RetryPolicy, Rollout
from agl.stores import MemoryStore
from agl_run import RunContext, Worker

LOST = ErrorInfo(type="agl.LeaseLapsed", message="silent")


class Watched:
    """A runner whose attempts take a moment; records which attempts ran at the same time."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.beside: dict[str, set[str]] = {}

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def execute(self, claim: Claim) -> Outcome:
        rollout_id = claim.rollout.rollout_id
        self.now.add(rollout_id)
        for each in self.now:
            self.beside[each] = self.beside.get(each, set()) | self.now
        await asyncio.sleep(0.02)
        self.now.discard(rollout_id)
        return Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")


async def lose(store: MemoryStore, name: str, *, times: int) -> None:
    """Queue a rollout that may lose four workers and has lost some of them."""
    await store.enqueue([Rollout(rollout_id=name, task=None, experiment=name, retry=RetryPolicy(max_losses=4))])
    for _ in range(times):
        (claim,) = await store.claim(worker="w", experiment=name)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="lost", error=LOST)])


async def run_all(losses: dict[str, int]) -> tuple[MemoryStore, Watched]:
    """Let one worker with three slots run rollouts with these losses, all queued at its start."""
    store, runner = MemoryStore(), Watched()
    for name, times in losses.items():
        await lose(store, name, times=times)
    async with Worker(RunContext(store=store, concurrency=3), runner):
        async with asyncio.timeout(30):
            while await store.rollouts(RolloutQuery(status=("queued", "running"))):
                await asyncio.sleep(0.01)
    return store, runner


def test_rollout_that_lost_half_of_its_workers_runs_alone() -> None:
    store, runner = asyncio.run(run_all({"a": 0, "b": 2, "c": 1, "d": 4, "e": 0, "f": 0}))
    assert ({"b"}, {"d"}) == (runner.beside["b"], runner.beside["d"])
    assert len(runner.beside["a"] | runner.beside["c"] | runner.beside["e"]) > 3
    assert {"succeeded"} == {each.status for each in asyncio.run(store.rollouts(RolloutQuery()))}


def test_declined_rollout_loses_nothing_by_it() -> None:
    store, _ = asyncio.run(run_all({"a": 2, "b": 2}))
    found = {each.rollout_id: (each.losses, each.failures) for each in asyncio.run(store.rollouts(RolloutQuery()))}
    assert {"a": (2, 0), "b": (2, 0)} == found


def test_stopped_worker_gives_back_what_it_declines() -> None:
    async def body() -> None:
        store = MemoryStore()
        await lose(store, "a", times=2)
        async with Worker(RunContext(store=store, concurrency=3), Watched()):
            while (await store.rollouts(RolloutQuery()))[0].attempts < 3:
                await asyncio.sleep(0)
        found = (await store.rollouts(RolloutQuery()))[0]
        assert ("queued", 2) == (found.status, found.losses)

    asyncio.run(body())
