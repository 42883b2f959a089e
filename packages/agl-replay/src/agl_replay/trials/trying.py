"""Runs several versions of one resource on the same tasks, for ``agl resources try``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from agl.contracts import RolloutQuery, Store
from agl.schemas import Episode, Json, ResourceVersion, Rollout, Span
from agl_inspect.records import ORIGIN, PROMPT_TRIAL
from agl_run import Progress
from agl_run.engine import Collector, Driver, Plan, cancel_unfinished, read_finished, trial


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The versions and tasks of a trial.

    Attributes:
        name: The resource.
        present: Its version that is live or labelled, ``""`` if no version holds the value in the experiment's file.
        versions: The versions to compare, the baseline first; ``None`` is the value in the experiment's file.
        tasks: The tasks.
        samples: Rollouts of each task with each version.
    """

    name: str
    present: str
    versions: Sequence[ResourceVersion | None]
    tasks: Sequence[Json]
    samples: int = 1


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A rollout of a trial that ended, with its deciding attempt's spans."""

    episode: Episode
    spans: Sequence[Span]


@dataclass(kw_only=True)
class Contested:
    """The progress of a trial, which is filled while it runs, so that an interrupted one can be reported.

    Attributes:
        versions: The versions, published, in the order of the contest.
        rollouts: All rollouts, in the order in which they are queued.
        ran: Those that ended, by id.
        is_complete: True once all have ended.
    """

    versions: list[ResourceVersion] = field(default_factory=list[ResourceVersion])
    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    ran: dict[str, Ran] = field(default_factory=dict[str, Ran])
    is_complete: bool = False


async def try_versions(plan: Plan, contest: Contest, *, progress: Progress, found: Contested) -> None:
    """Run the contest as the experiment ``NAME-try``, and fill ``found``, also if it is cancelled.

    Versions that are new are published; nothing else of the experiment changes.
    """
    live = {contest.name: contest.present} if contest.present else {}
    async with trial(plan, record_as=f"{plan.name}{PROMPT_TRIAL}", progress=progress, live=live) as driver:
        found.versions = [await _published(driver, contest.name, version) for version in contest.versions]
        collector = driver.collector(f"try-{time.time_ns() // 1_000_000}", None)
        arms = [{contest.name: version.version} for version in found.versions]
        found.rollouts = collector.side_by_side(contest.tasks, arms, n=contest.samples, mode="test")
        try:
            episodes = await collector.run(found.rollouts)
            found.is_complete = True
            driver.agreement.report(episodes, trains=False)
        finally:
            await cancel_unfinished(driver.session.store, driver.name)
            found.ran = await _read(driver.session.store, collector, found.rollouts)


async def _published(driver: Driver, name: str, version: ResourceVersion | None) -> ResourceVersion:
    live = driver.session.live
    if version is None:
        return live.current(name)
    parent = version.parent or (live.current(name).version if version.metadata.get("origin") == ORIGIN else "")
    return await live.publish(msgspec.structs.replace(version, parent=parent))


async def _read(store: Store, collector: Collector, rollouts: Sequence[Rollout]) -> dict[str, Ran]:
    """Read those of the rollouts that ended by themselves."""
    wanted = {rollout.rollout_id for rollout in rollouts}
    first = min(wanted).removesuffix("00")  # so that the page begins with it
    query = RolloutQuery(experiment=rollouts[0].experiment, status=("succeeded", "failed"), after=first)
    ended: list[str] = []
    while page := await store.rollouts(query):
        ended += [rollout.rollout_id for rollout in page if rollout.rollout_id in wanted]
        query = query.next(page[-1])
    recordings = await read_finished(store, ended)
    return {each.rollout.rollout_id: Ran(episode=collector.episode(each), spans=each.spans) for each in recordings}
