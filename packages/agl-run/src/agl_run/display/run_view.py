"""The numbers that a terminal shows of a run: what the trainer knows anyway, kept where a display reads it.

The trainer writes and one display reads, from a thread of its own: every field is replaced or appended to as a whole.
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
"""Seconds over which the rate of rollouts is measured."""

_MOST_REWARDS = 10_000


class Tally:
    """Counts the rollouts of one caller: in the queue, running, failed, and finished per second.

    Args:
        clock: Returns seconds.

    Attributes:
        asked: Rollouts of the requests under way.
        done: Those of them that are finished.
        failed: Rollouts that failed, of all requests.
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
        """Count the rollouts of a request; those of earlier ones are forgotten once all of them are finished."""
        # Requests that overlap count together; once all are finished the count starts anew.
        if self.done == self.asked:
            self.asked, self.done = 0, 0
        self.asked += len(rollout_ids)
        self._statuses |= dict.fromkeys(rollout_ids, "queued")
        if self._began_at is None:
            self._began_at = self._clock()

    def note(self, rollout_id: str, status: str) -> None:
        """Note that a rollout changed its status; one that nobody asked for is not counted."""
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
        """Forget the rollouts of a request that nobody waits for any more."""
        for rollout_id in rollout_ids:
            if self._statuses.pop(rollout_id, None) is not None:
                self.asked -= 1

    @property
    def running(self) -> int:
        """Rollouts that a worker has."""
        return list(self._statuses.values()).count("running")

    @property
    def queued(self) -> int:
        """Rollouts that wait for a worker."""
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
    """The numbers of one algorithm.

    Attributes:
        name: Its name within the experiment.
        total: Its steps in all, 0 if it sets no limit.
        step: Its steps so far.
        left: The time that it still takes, as a text.
        has_begun: It is set up.
        is_finished: It takes no further step.
        reward: The mean training reward of its newest step, ``None`` without any.
        spread: Half the width of that reward's 95 % interval over the groups; ``None`` for fewer than two.
        rewards: The mean training rewards of the steps that this process saw, first to last.
        work: What it does within a step, as (done, total, text); ``None`` between two.
    """

    name: str
    total: int = 0
    step: int = 0
    left: str = ""
    has_begun: bool = False
    is_finished: bool = False
    reward: float | None = None
    spread: float | None = None
    rewards: deque[float] = field(default_factory=lambda: deque[float](maxlen=_MOST_REWARDS))
    work: tuple[int, int, str] | None = None
    _groups: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))

    def collected(self, episodes: Iterable[Episode]) -> None:
        """Note the rewards of training rollouts of the step under way."""
        for episode in episodes:
            if episode.reward is not None:
                self._groups[episode.rollout.group_id].append(episode.reward)

    def stepped(self, report: StepReport) -> None:
        """Note the end of a step, whose reported reward counts before the mean of its rollouts."""
        self.step, self.is_finished, self.work = report.step, report.is_finished, None
        # Groups and not rollouts are independent: those of one task share its difficulty.
        means = [fmean(rewards) for rewards in self._groups.values()]
        self._groups.clear()
        reward = report.metrics.get("reward", fmean(means) if means else math.nan)
        # A step without any reward changes nothing that is shown.
        if math.isfinite(reward):
            low, high = interval(means)
            self.reward, self.spread = reward, (high - low) / 2 if math.isfinite(high) else None
            self.rewards.append(reward)


@dataclass(kw_only=True)
class RunView(Observer):
    """The numbers of a run.

    Attributes:
        algorithms: The algorithms by name, in the order of the experiment's file.
        tallies: The rollouts by caller: an algorithm, or another part of the run.
        validation: The newest validation as (steps before it, mean reward), ``None`` without any.
        best: The best validation, likewise.
    """

    algorithms: dict[str, AlgorithmView] = field(default_factory=dict[str, AlgorithmView])
    tallies: dict[str, Tally] = field(default_factory=dict[str, Tally])
    validation: tuple[int, float] | None = None
    best: tuple[int, float] | None = None

    def batch(self, batch: Batch) -> None:
        """Note the rewards of a step under way."""
        if batch.trains and batch.is_own and batch.caller in self.algorithms:
            self.algorithms[batch.caller].collected(batch.kept)

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """Note the end of a step."""
        if algorithm in self.algorithms:
            self.algorithms[algorithm].stepped(report)

    def tally(self, caller: str) -> Tally:
        """Return the counts of a caller's rollouts."""
        return self.tallies.setdefault(caller, Tally())
