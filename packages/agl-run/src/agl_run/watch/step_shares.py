"""Measures of a step what its algorithm does not see: rewards that broke, and places that had no rollout.

The places are those of this process's runner. What workers on other machines do is not measured.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from agl.schemas import Episode
from agl_inspect.records import broke_in_reward
from agl_run.worker.slots import Places


class _Sums:
    """What was measured since a caller's last step."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.unjudged = 0
        self.place_s = 0.0
        self.taken_s = 0.0


class StepShares:
    """The sums of a run's steps, by algorithm.

    Args:
        places: The places of the runner.
        is_judged: Whether there are reward emitters.
    """

    def __init__(self, places: Places, *, is_judged: bool) -> None:
        self._places = places
        self._is_judged = is_judged
        self._sums: defaultdict[str, _Sums] = defaultdict(_Sums)

    @contextmanager
    def collecting(self, caller: str) -> Generator[None]:
        """Measure how many places are taken while ``caller`` waits for rollouts."""
        began, before = self._places.now()
        try:
            yield
        finally:
            now, after = self._places.now()
            sums = self._sums[caller]
            sums.place_s += self._places.count * (now - began)
            sums.taken_s += after - before

    def add(self, caller: str, episodes: Sequence[Episode]) -> None:
        """Count the rollouts that ``caller`` collected."""
        sums = self._sums[caller]
        sums.rollouts += len(episodes)
        sums.unjudged += sum(broke_in_reward(episode.attempt) for episode in episodes)

    def take(self, caller: str) -> Mapping[str, float]:
        """Return the shares since the last time, as metrics of a step; none that say nothing.

        ``evaluator_failed_share`` is the share of the rollouts that failed in a reward emitter, ``places`` the number
        of agents that may run at once, and ``places_idle_share`` the share of these places, over the time of
        collecting, that had no agent.
        """
        sums = self._sums.pop(caller, _Sums())
        found: dict[str, float] = {}
        if self._is_judged and sums.rollouts:
            found["evaluator_failed_share"] = sums.unjudged / sums.rollouts
        if sums.taken_s > 0:  # a repeated step finds its rollouts finished
            found["places"] = float(self._places.count)
            found["places_idle_share"] = max(0.0, 1 - sums.taken_s / sums.place_s)
        return found
