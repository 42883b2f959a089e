"""Forks a recorded rollout at one of its calls, for ``agl replay --fork``."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agl.contracts import ForkPlan, Recording, RolloutQuery, Store, is_diverged
from agl.errors import NotFoundError
from agl.schemas import Episode, Record, Rollout
from agl_inspect.records.names import FORKS
from agl_inspect.rollouts.answers import answer_counts
from agl_inspect.statistics import interval
from agl_run import Progress
from agl_run.engine import Plan, cancel_unfinished, read_finished, trial


@dataclass(kw_only=True)
class Forked:
    """The progress of forks, filled in while they run, so that interrupted ones can be reported too.

    Attributes:
        rollouts: The forks, in the order in which they are queued.
        episodes: The episodes of the forks that have ended.
        is_complete: True once all forks have ended.
    """

    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    episodes: list[Episode] = field(default_factory=list[Episode])
    is_complete: bool = False


async def fork_rollout(
    plan: Plan, recorded: Rollout, fork: ForkPlan, *, n: int, progress: Progress, found: Forked
) -> None:
    """Run the forks as the experiment ``NAME-fork``, and fill in ``found``, even if the call is cancelled.

    Forks use the prompts of the recorded rollout, because the agent must repeat its recorded calls; the policies are
    the live ones.

    Raises:
        NotFoundError: A prompt of the recorded rollout is no longer in the store.
    """
    prompts = {name: version for name, version in recorded.resources.items() if name in plan.resources}
    async with trial(plan, record_as=f"{plan.name}{FORKS}", progress=progress, live=prompts) as driver:
        store = driver.running.store
        collector = driver.collector(f"fork-{time.time_ns() // 1_000_000}", None)
        found.rollouts = collector.forks(recorded, fork, n=n)
        try:
            await collector.run(found.rollouts)
            found.is_complete = True
        finally:
            await cancel_unfinished(store, driver.name)
            found.episodes = [collector.episode(one) for one in await read_ended(store, found.rollouts)]


async def read_ended(store: Store, rollouts: Sequence[Rollout]) -> list[Recording]:
    """Read those of the rollouts that succeeded or failed; empty if they were never queued."""
    ids = tuple(rollout.rollout_id for rollout in rollouts)
    try:
        known = await store.rollouts(RolloutQuery(ids=ids, limit=max(1, len(ids))))
    except NotFoundError:
        return []
    return await read_finished(store, [one.rollout_id for one in known if one.status in ("succeeded", "failed")])


CONFIDENCE = 0.95
FEWEST_ALIKE = 6
"""From this number of forks on, equal rewards count as significant: all on one side by chance has 2 / 2 ** 6 < 0.05."""


class ForkedRollout(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of one fork.

    Attributes:
        reward: The fork's reward; ``None`` if the fork failed or got no reward.
        model_calls: Number of calls that a model answered.
        replayed_calls: Number of calls that the recording answered.
        is_diverged: True if the fork failed because the agent did not repeat the recorded calls.
        error: The error of a failed fork.
    """

    rollout_id: str
    status: str
    reward: float | None
    model_calls: int
    replayed_calls: int
    is_diverged: bool
    error: str


class ForkReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The forks of a rollout at one of its calls.

    Attributes:
        rollout_id: The recorded rollout.
        call: Number of the call among those of the recorded rollout, from 1.
        calls: Number of calls of the recorded rollout.
        span_id: The id of the call's span.
        agent: The agent that made the call.
        reward: The recorded reward.
        mean: Mean of the forks' rewards; ``None`` if no fork has a reward.
        low: Lower end of Student's 95 % interval of ``mean``; ``None`` for fewer than two rewards.
        high: Upper end of the same interval.
        verdict: The comparison as a sentence.
        is_complete: False if the forks were stopped before all of them had ended.
    """

    rollout_id: str
    call: int
    calls: int
    span_id: str
    agent: str
    reward: float | None
    mean: float | None
    low: float | None
    high: float | None
    verdict: str
    is_complete: bool
    forks: list[ForkedRollout]


def describe_fork(episode: Episode) -> ForkedRollout:
    """Return the result of one fork, for a report."""
    rollout, error = episode.rollout, episode.attempt.error if episode.attempt else None
    counts = answer_counts(call.model_version for call in episode.transitions)
    return ForkedRollout(
        rollout_id=rollout.rollout_id,
        status=rollout.status,
        reward=episode.reward if rollout.status == "succeeded" else None,
        model_calls=counts.live,
        replayed_calls=counts.replayed,
        is_diverged=is_diverged(episode),
        error=f"{error.type.rpartition('.')[2]}: {error.message}" if error else "",
    )


def judged(report: ForkReport) -> ForkReport:
    """Return the report with the mean reward of its forks, the interval and the verdict filled in."""
    rewards = [fork.reward for fork in report.forks if fork.reward is not None]
    low, high = interval(rewards, confidence=CONFIDENCE) if rewards else (-math.inf, math.inf)
    is_known = math.isfinite(low)
    return ForkReport(
        **{name: getattr(report, name) for name in ForkReport.__struct_fields__ if name not in _JUDGED},
        mean=fmean(rewards) if rewards else None,
        low=low if is_known else None,
        high=high if is_known else None,
        verdict=_verdict(report, rewards, low, high),
    )


_JUDGED = ("mean", "low", "high", "verdict")


def _verdict(report: ForkReport, rewards: Sequence[float], low: float, high: float) -> str:
    if not rewards:
        return "no fork has a reward, so nothing can be said about the call"
    if report.reward is None:
        return "the recorded rollout has no reward to compare with"
    if not math.isfinite(low):
        return "one reward says nothing certain; take more forks with --n"
    if len(set(rewards)) == 1 and rewards[0] != report.reward and len(rewards) < FEWEST_ALIKE:
        alike = f"all {len(rewards)} rewards of the forks are {rewards[0]:g}, which may be chance"
        return f"{alike}; take {FEWEST_ALIKE} forks at least with --n"
    later = f" or later; --at {report.call + 1} tells the two apart" if report.call < report.calls else ""
    if low > report.reward:
        return f"the forks do better than the recorded run, so it went wrong at call {report.call}{later}"
    if high < report.reward:
        return f"the forks do worse than the recorded run, which owes its reward to call {report.call}{later}"
    if report.call == 1:
        return "the forks do as the recorded run did: its reward is what this task usually brings"
    return (
        f"the forks do as the recorded run did, so nothing shows that call {report.call} or a later one decided it; "
        f"--at with a number below {report.call} looks before it"
    )
