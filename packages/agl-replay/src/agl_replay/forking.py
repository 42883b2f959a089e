"""Forks a recorded rollout at one of its calls, for ``agl replay --fork``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from msgspec.structs import replace

from agl.acceptance import odds_text
from agl.contracts import ForkPlan, Recording, RolloutQuery, Store, is_diverged
from agl.errors import NotFoundError
from agl.schemas import Episode, Record, Rollout
from agl_inspect.records.names import FORKS
from agl_inspect.rollouts.answers import answer_counts
from agl_inspect.statistics import Comparison, compare
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


MOST = 1000
"""The most forks of one call."""


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
        comparison: The rewards of the forks against the recorded reward; ``None`` if either is missing.
        verdict: The comparison as a sentence.
        is_complete: False if the forks were stopped before all of them had ended.
    """

    rollout_id: str
    call: int
    calls: int
    span_id: str
    agent: str
    reward: float | None
    is_complete: bool
    forks: list[ForkedRollout]
    mean: float | None = None
    comparison: Comparison | None = None
    verdict: str = ""


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
    """Return the report with the mean reward of its forks, the comparison and the verdict filled in."""
    rewards = [fork.reward for fork in report.forks if fork.reward is not None]
    mean = fmean(rewards) if rewards else None
    if mean is None or report.reward is None:
        missing = "no fork has a reward" if mean is None else "the recorded rollout has no reward"
        return replace(report, mean=mean, verdict=f"{missing}, so nothing can be said about the call")
    comparison = compare([report.reward] * len(rewards), rewards)
    return replace(report, mean=mean, comparison=comparison, verdict=_verdict(report, comparison))


def _verdict(report: ForkReport, found: Comparison) -> str:
    later = f" or later; --at {report.call + 1} tells the two apart" if report.call < report.calls else ""
    odds = f"evidence {odds_text(max(found.evidence, found.evidence_of_harm))}"
    if found.verdict == "better":
        return f"the forks do better than the recorded run, {odds}, so it went wrong at call {report.call}{later}"
    if found.verdict == "worse":
        return f"the forks do worse than the recorded run, {odds}, which owes its reward to call {report.call}{later}"
    if found.needed is not None and found.needed <= MOST:
        return (
            f"the forks cannot be told apart from the recorded run: {odds}, and {odds_text(found.threshold)} is "
            f"needed; about {found.needed:,} forks would do, see --n"
        )
    if report.call == 1:
        return "the forks do as the recorded run did: its reward is what this task usually brings"
    return (
        f"the forks do as the recorded run did, so nothing shows that call {report.call} or a later one decided it; "
        f"--at with a number below {report.call} looks before it"
    )
