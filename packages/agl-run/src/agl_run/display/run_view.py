"""The current numbers of a run, which the trainer writes and a terminal display reads.

The display reads them from another thread, so every field is replaced or appended to in one operation.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agl.contracts import StepReport
from agl.schemas import TERMINAL_ROLLOUT, Episode
from agl_inspect.statistics import interval
from agl_run.watch.observers import Batch, Observer

_WINDOW_S = 30
"""Length in seconds of the window over which the rate of finished rollouts is measured."""

_MOST_REWARDS = 10_000


class Tally:
    """Counts the rollouts of one caller, such as an algorithm: queued, running, failed, and finished per second.

    Args:
        clock: Returns seconds.

    Attributes:
        asked: Rollouts of the unfinished requests.
        done: Finished rollouts of the unfinished requests.
        failed: Failed rollouts of all requests.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._statuses: dict[str, str] = {}
        self._ends: deque[tuple[int, int]] = deque()
        self._began_at: float | None = None
        self.asked: int = 0
        self.done: int = 0
        self.failed: int = 0

    def ask(self, rollout_ids: Sequence[str]) -> None:
        """Add a request's rollouts to the count; the count restarts at zero if all earlier requests are finished."""
        # Overlapping requests count together; once all are finished, the next one starts a new
        # count.
        if self.done == self.asked:
            self.asked, self.done = 0, 0
        self.asked += len(rollout_ids)
        self._statuses |= dict.fromkeys(rollout_ids, "queued")
        if self._began_at is None:
            self._began_at = self._clock()

    def note(self, rollout_id: str, status: str) -> None:
        """Record a rollout's new status; a rollout that belongs to no counted request is ignored."""
        if rollout_id not in self._statuses:
            return
        # A second attempt puts a rollout back into the queue.
        if status not in TERMINAL_ROLLOUT:
            self._statuses[rollout_id] = status
            return
        del self._statuses[rollout_id]
        self.done += 1
        self.failed += status == "failed"
        self._count_end()

    def drop(self, rollout_ids: Iterable[str]) -> None:
        """Remove the unfinished rollouts of an abandoned request from the count."""
        for rollout_id in rollout_ids:
            if self._statuses.pop(rollout_id, None) is not None:
                self.asked -= 1

    @property
    def running(self) -> int:
        """The number of rollouts that a worker is running."""
        return list(self._statuses.values()).count("running")

    @property
    def queued(self) -> int:
        """The number of rollouts that wait for a worker."""
        return list(self._statuses.values()).count("queued")

    def per_second(self) -> float:
        """Return the finished rollouts per second over the last half minute."""
        now = self._clock()
        # In the first half minute the window is as long as the run.
        since = max(now - _WINDOW_S, now if self._began_at is None else self._began_at)
        count = sum(count for second, count in list(self._ends) if second >= now - _WINDOW_S)
        return count / max(1.0, now - since)

    def _count_end(self) -> None:
        second = int(self._clock())
        if self._ends and self._ends[-1][0] == second:
            self._ends[-1] = (second, self._ends[-1][1] + 1)
        else:
            # One entry per second keeps the window small at any rate.
            self._ends.append((second, 1))
        while self._ends[0][0] < second - _WINDOW_S:
            self._ends.popleft()


@dataclass(kw_only=True)
class AlgorithmView:
    """The progress and rewards of one algorithm, for the display.

    Attributes:
        name: The algorithm's name within the experiment.
        total: The number of steps that the algorithm will take; 0 if it sets no limit.
        step: The number of steps that the algorithm has taken.
        left: The estimated time that remains, as text.
        has_begun: Whether the algorithm is set up.
        is_finished: Whether the algorithm will take no further step.
        reward: The mean training reward of the newest step; ``None`` before the first reward.
        ends: The ends of the 95 % interval of ``reward`` over the groups; infinite for fewer than two groups.
        rewards: The mean training rewards of the steps that this process ran, oldest first.
        work: The progress of the current step's work as (done, total, text); ``None`` between two steps.
    """

    name: str
    total: int = 0
    step: int = 0
    left: str = ""
    has_begun: bool = False
    is_finished: bool = False
    reward: float | None = None
    ends: tuple[float, float] = (-math.inf, math.inf)
    rewards: deque[float] = field(default_factory=lambda: deque[float](maxlen=_MOST_REWARDS))
    work: tuple[int, int, str] | None = None
    _groups: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))

    def collected(self, episodes: Iterable[Episode]) -> None:
        """Record the rewards of training rollouts of the current step."""
        for episode in episodes:
            if episode.reward is not None:
                self._groups[episode.rollout.group_id].append(episode.reward)

    def stepped(self, report: StepReport) -> None:
        """Record the end of a step; a reward in the report takes precedence over the mean reward of the rollouts."""
        self.step, self.is_finished, self.work = report.step, report.is_finished, None
        # Only groups are independent; the rollouts of one group share the difficulty of their task.
        means = [fmean(rewards) for rewards in self._groups.values()]
        self._groups.clear()
        reward = report.metrics.get("reward", fmean(means) if means else math.nan)
        # A step without any reward changes nothing that is shown.
        if math.isfinite(reward):
            self.reward, self.ends = reward, interval(means)
            self.rewards.append(reward)


@dataclass(kw_only=True)
class RunView(Observer):
    """The progress and rewards of a run, for the display.

    Attributes:
        algorithms: The algorithms by name, in the order of the experiment's file.
        tallies: The counts of rollouts by caller: an algorithm, or another part of the run.
        validation: The newest validation as (number of steps before the validation, mean reward); ``None`` before the
            first one.
        best: The best validation in the same form; ``None`` before the first one.
    """

    algorithms: dict[str, AlgorithmView] = field(default_factory=dict[str, AlgorithmView])
    tallies: dict[str, Tally] = field(default_factory=dict[str, Tally])
    validation: tuple[int, float] | None = None
    best: tuple[int, float] | None = None

    def batch(self, batch: Batch) -> None:
        """Record the rewards of a batch of an algorithm's own training rollouts."""
        if batch.trains and batch.is_own and batch.caller in self.algorithms:
            self.algorithms[batch.caller].collected(batch.kept)

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """Record the end of an algorithm's step."""
        if algorithm in self.algorithms:
            self.algorithms[algorithm].stepped(report)

    def tally(self, caller: str) -> Tally:
        """Return the counts of a caller's rollouts, which start at zero for a new caller."""
        return self.tallies.setdefault(caller, Tally())
