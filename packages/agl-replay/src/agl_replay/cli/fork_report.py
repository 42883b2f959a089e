"""Reports forks: the reward of each, their mean beside the recorded reward, and the difference that the call made."""

import math
from collections.abc import Iterator, Sequence

from agl.contracts import is_diverged
from agl.schemas import Episode, Record
from agl_inspect.rollouts import answer_counts
from agl_inspect.statistics import FEWEST_ALIKE, interval, mean
from agl_inspect.terminal import echo, print_table, short

CONFIDENCE = 0.95


class ForkedRollout(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A fork.

    Attributes:
        reward: ``None`` for a fork that failed or got none.
        model_calls: Calls that a model answered; ``replayed_calls`` those that the recording answered.
        is_diverged: The fork failed because its calls were not those of the recording.
        error: The error of a fork that failed.
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
        call: Number of the call among those of the recorded rollout, from 1; ``calls`` says how many there are.
        span_id: The call's span.
        agent: The agent that made the call.
        reward: The recorded reward.
        mean: Mean reward of the forks that have one; ``low`` and ``high`` are the ends of its 95 % interval (Student),
            ``None`` for fewer than two.
        verdict: The comparison in words.
        is_complete: False if the forks were stopped before all had ended.
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
    """Return what a report says of one fork."""
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
    """Return the report with the mean of its forks and the verdict."""
    rewards = [fork.reward for fork in report.forks if fork.reward is not None]
    low, high = interval(rewards, confidence=CONFIDENCE) if rewards else (-math.inf, math.inf)
    is_known = math.isfinite(low)
    return ForkReport(
        **{name: getattr(report, name) for name in ForkReport.__struct_fields__ if name not in _JUDGED},
        mean=mean(rewards) if rewards else None,
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


def print_forks(report: ForkReport) -> None:
    """Print the forks as a table, the errors of those that failed, the mean and the verdict."""
    by = f" by {report.agent}" if report.agent else ""
    echo(f"{report.rollout_id} from call {report.call} of {report.calls}{by} on; recorded {_reward(report.reward)}")
    rows = [
        (
            fork.rollout_id,
            "diverged" if fork.is_diverged else fork.status,
            "-" if fork.reward is None else f"{fork.reward:g}",
            str(fork.replayed_calls),
            str(fork.model_calls),
        )
        for fork in report.forks
    ]
    print_table(("fork", "status", "reward", "replayed", "model calls"), rows)
    for line in _errors(report.forks):
        echo(line)
    if report.mean is not None:
        ends = "" if report.low is None else f", {CONFIDENCE:.0%} interval [{report.low:.3g}, {report.high:.3g}]"
        count = sum(fork.reward is not None for fork in report.forks)
        forks = f"{count} fork{'' if count == 1 else 's'}"
        echo(f"mean reward {report.mean:.3g}{ends}, {forks}; recorded {_reward(report.reward)}")
    echo(report.verdict)
    if not report.is_complete:
        echo("stopped before all forks had ended")


def _reward(value: float | None) -> str:
    return "no reward" if value is None else f"reward {value:g}"


def _errors(forks: Sequence[ForkedRollout]) -> Iterator[str]:
    """Describe each error once, with the number of forks that had it."""
    counts: dict[str, int] = {}
    for fork in forks:
        if fork.error:
            counts[fork.error] = counts.get(fork.error, 0) + 1
    for error, count in counts.items():
        yield f"{count} of {len(forks)}: {short(error, 600)}"
