"""Works on a store whose server is disturbed meanwhile, for tests of stores on a server."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from agl.contracts import RolloutQuery, Store
from agl.schemas import RetryPolicy, Rollout
from agl_testing.stores.samples import make_span, outcome_of
from agl_testing.waiting import eventually

ONE_ATTEMPT = RetryPolicy(max_attempts=1)


async def work(store: Store, name: str, until: asyncio.Event, done: list[str]) -> None:
    """Run rollouts one after the other; each may have only one attempt, so a lost rollout would fail."""
    number = 0
    while not until.is_set():
        number += 1
        rollout_id = f"{name}-{number}"
        await store.enqueue([Rollout(rollout_id=rollout_id, task=number, experiment=name, retry=ONE_ATTEMPT)])
        (claim,) = await store.claim(worker=name, experiment=name, wait_s=30)
        await store.append_spans([make_span(claim, name="work")])
        await store.finish([outcome_of(claim, spans=[make_span(claim, name="last")])])
        done.append(rollout_id)


async def check(store: Store, done: list[str]) -> None:
    """Check that every rollout succeeded at once, each span exists once, and the feed reports all changes in order."""
    rollouts = await store.rollouts(RolloutQuery(ids=tuple(done)))
    assert {("succeeded", 1)} == {(rollout.status, rollout.attempts) for rollout in rollouts}
    assert [] == await store.rollouts(RolloutQuery(status=("failed", "queued")))
    feed = await store.changes(limit=100_000)
    assert sorted({change.cursor for change in feed}) == [change.cursor for change in feed]
    lives: defaultdict[str, list[str]] = defaultdict(list)
    for change in feed:
        if change.kind == "rollout":
            lives[change.key].append(change.status)
    for rollout_id in done:
        assert ["work", "last"] == [span.name for span in await store.spans(rollout_id)]
        assert ["queued", "running", "succeeded"] == lives[rollout_id]


async def disturbed(make: Callable[[], Store], disturb: Callable[[], None], *, rounds: int) -> None:
    """Run four workers on two stores, call ``disturb`` several times, and check that nothing is lost or repeated.

    A caller that has waited since before the first disturbance is woken at the end.
    """
    stores, until, done = [make(), make()], asyncio.Event(), list[str]()
    workers = [
        asyncio.create_task(work(store, f"{at}{number}", until, done))
        for at, store in enumerate(stores)
        for number in range(2)
    ]
    waiting = asyncio.create_task(stores[0].claim(worker="late", experiment="late", wait_s=600))
    for _ in range(rounds):
        before = len(done)
        await eventually(lambda count=before + 4: len(done) >= count)
        await asyncio.to_thread(disturb)
    before = len(done)
    await eventually(lambda: len(done) >= before + 4)
    until.set()
    await asyncio.gather(*workers)
    await stores[1].enqueue([Rollout(rollout_id="late", task=None, experiment="late")])
    begin = time.monotonic()
    assert ["late"] == [claim.rollout.rollout_id for claim in await waiting]
    assert time.monotonic() - begin < 30, "a caller that waited before the restart is woken as before"
    await check(stores[0], done)
    for store in stores:
        await store.close()
