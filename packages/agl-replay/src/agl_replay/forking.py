"""Forks a recorded rollout at one of its calls, for ``agl replay --fork``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agl.contracts import ForkPlan, RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Episode, Rollout
from agl_inspect.records import FORKS
from agl_run import Progress
from agl_run.engine import Collector, Plan, cancel_unfinished, read_finished, trial


@dataclass(kw_only=True)
class Forked:
    """The progress of a request for forks, which is filled while they run, so that an interrupted one can be reported.

    Attributes:
        rollouts: The forks, in the order in which they are queued.
        episodes: Those that ended, in the same order.
        is_complete: True once all have ended.
    """

    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    episodes: list[Episode] = field(default_factory=list[Episode])
    is_complete: bool = False


async def fork_rollout(
    plan: Plan, recorded: Rollout, fork: ForkPlan, *, n: int, progress: Progress, found: Forked
) -> None:
    """Run the forks as the experiment ``NAME-fork``, and fill ``found``, also if it is cancelled.

    The prompts are those of the recorded rollout, because its calls must come again; the policies are the live ones.

    Raises:
        NotFoundError: A prompt that the recorded rollout ran with is no longer in the store.
    """
    prompts = {name: version for name, version in recorded.resources.items() if name in plan.resources}
    async with trial(plan, record_as=f"{plan.name}{FORKS}", progress=progress, live=prompts) as driver:
        store = driver.session.store
        collector = driver.collector(f"fork-{time.time_ns() // 1_000_000}", None)
        found.rollouts = collector.forks(recorded, fork, n=n)
        try:
            await collector.run(found.rollouts)
            found.is_complete = True
        finally:
            await cancel_unfinished(store, driver.name)
            found.episodes = await _read(store, collector, found.rollouts)


async def _read(store: Store, collector: Collector, rollouts: Sequence[Rollout]) -> list[Episode]:
    """Read those of the rollouts that ended by themselves; none if they were never queued."""
    try:
        known = await store.rollouts(RolloutQuery(ids=tuple(rollout.rollout_id for rollout in rollouts)))
    except NotFoundError:
        return []
    ended = [rollout.rollout_id for rollout in known if rollout.status in ("succeeded", "failed")]
    return [collector.episode(recording) for recording in await read_finished(store, ended)]
