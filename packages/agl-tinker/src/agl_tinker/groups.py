"""Chooses the tasks of a step and replaces its silent groups, in plain Python: nothing here needs torch.

A group is silent when no advantage of its calls differs from 0. With `refill` a step runs further tasks in the place of
silent groups, as in DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2), at most so many rounds. With a curriculum a
step draws a share of its tasks from shuffles of all, and the others with a weight that follows from the share p of the
possible reward that a task's rollouts earned: p (1 - p) for `frontier`, 1 - p for `unsolved`.

``agl_objectives.groups`` and ``agl_objectives.tasks`` do the same for the algorithms that have torch, and say where
they part from the papers. A test holds the draws of the two against each other.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Literal

from agl.contracts import AlgorithmContext, Collected
from agl.errors import ConfigError, RunError
from agl.hints import did_you_mean
from agl.schemas import Episode, Json

Curriculum = Literal["", "frontier", "unsolved"]
"""The tasks that a curriculum prefers; none for ``""``."""

WEIGHTS: Mapping[str, Callable[[float], float]] = {"frontier": lambda p: p * (1 - p), "unsolved": lambda p: 1 - p}
"""The weight of a task whose rollouts earned the share p of the possible reward, by curriculum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups to train on, the rollouts of those that were replaced, drops by reason, and metrics."""

    groups: list[list[Episode]]
    replaced: list[Episode]
    dropped: Counter[str]
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class TaskLevels:
    """What a curriculum knows: each task's mean reward, newer ones weighing more, and the range of all rewards."""

    means: dict[int, float] = field(default_factory=dict[int, float])
    low: float = float("inf")
    high: float = float("-inf")

    def note(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Learn from the rewards of a step, by the place of their task."""
        for place, found in rewards.items():
            mean = fmean(found)
            self.means[place] = (self.means[place] + mean) / 2 if place in self.means else mean
            self.low, self.high = min(self.low, *found), max(self.high, *found)

    def share(self, place: int) -> float | None:
        """Return p of a task, ``None`` before its first rollout or while all rewards are the same."""
        if place not in self.means or self.low >= self.high:
            return None
        return (self.means[place] - self.low) / (self.high - self.low)


class GroupSampler:
    """Collects the groups of a run's steps. Call :meth:`begin` first.

    Args:
        count: Groups per step; ``n`` rollouts each.
        refill: Rounds in which silent groups are replaced.
        curriculum: The tasks to prefer; at least the share ``uniform`` is drawn without preference.
        is_silent: Returns true for a group without a gradient.

    Raises:
        ConfigError: A value is unknown or out of range.
    """

    def __init__(
        self,
        *,
        count: int,
        n: int,
        refill: int,
        curriculum: Curriculum,
        uniform: float,
        is_silent: Callable[[Sequence[Episode]], bool],
    ) -> None:
        if refill < 0:
            raise ConfigError(f"tinker got refill = {refill}; give the most rounds of a step, or 0 for none")
        if curriculum and curriculum not in WEIGHTS:
            hint = did_you_mean(curriculum, WEIGHTS, otherwise=f"use one of {', '.join(WEIGHTS)}")
            raise ConfigError(f"tinker got curriculum = {curriculum!r}, which is unknown; {hint}")
        if not 0 < uniform <= 1 or (uniform != 0.5 and not curriculum):
            raise ConfigError(
                f"tinker got curriculum_uniform = {uniform}; give a share above 0 and at most 1, with a curriculum"
            )
        self._count, self._n, self._refill = count, n, refill
        self._curriculum: Curriculum = curriculum
        self._uniform, self._is_silent = uniform, is_silent
        self._levels = TaskLevels()

    def begin(self, context: AlgorithmContext) -> None:
        """Take the algorithm's context."""
        self._context = context

    async def collect(self, step: int) -> StepGroups:
        """Run the tasks of a step, and those in the place of its silent groups."""
        places = self.first(step)
        metrics = self._described(places)
        found = await self._run(step, places)
        begun, dropped = found.groups(), Counter(found.dropped)
        groups = list(begun)
        loud = [group for group in groups if not self._is_silent(group)]
        taken, rounds = list(places), 0
        while len(loud) < len(places) and rounds < self._refill:
            further = self._further(step, taken=taken, count=len(places) - len(loud))
            if not further:  # the step has taken every task
                break
            # The key counts the further tasks of earlier rounds: the same tasks always have the same ids.
            found = await self._run_further(step, further, key=f"refill{len(taken) - len(places)}")
            taken, rounds = taken + further, rounds + 1
            dropped.update(found.dropped)
            fresh = found.groups()
            groups += fresh
            loud += [group for group in fresh if not self._is_silent(group)]
        kept = groups if not self._refill else loud or begun
        replaced = [group for group in groups if not any(group is other for other in kept)]
        if self._refill:
            extra = (len(taken) - len(places)) * self._n
            metrics |= _counts(groups, replaced=len(replaced), loud=len(loud), wanted=len(places))
            metrics |= {"rollouts_extra": float(extra), "refill_rounds": float(rounds)}
        self._levels.note(self._rewards([episode for group in groups for episode in group], taken))
        return StepGroups(
            groups=kept, replaced=[episode for group in replaced for episode in group], dropped=dropped, metrics=metrics
        )

    def first(self, step: int) -> list[int]:
        """Return the places in ``context.train`` of the tasks that a step begins with, none twice."""
        size = len(self._context.train)
        count = min(self._count, size)
        if not self._curriculum:
            return self._shuffled(step, count)
        shuffled = self._shuffled(step, max(1, round(count * self._uniform)))
        return shuffled + self._further(step, taken=shuffled, count=count - len(shuffled))

    def state(self) -> dict[str, Json]:
        """Return what the curriculum knows as JSON; empty without one."""
        levels = self._levels
        if not self._curriculum or not levels.means:
            return {}
        means: dict[str, Json] = {str(place): mean for place, mean in levels.means.items()}
        return {"low": levels.low, "high": levels.high, "means": means}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from ``state``, also with more or fewer tasks at the end."""
        self._levels = TaskLevels()
        if state:
            known: Any = state["means"]
            means = {int(place): float(mean) for place, mean in known.items()}
            self._levels = TaskLevels(means=means, low=float(state["low"]), high=float(state["high"]))

    def _shuffled(self, step: int, count: int) -> list[int]:
        """Return the tasks of a step from shuffles by epoch; those of an epoch that fill no step are left out of it."""
        size = len(self._context.train)
        epoch, place = divmod(step - 1, size // count)
        order = list(range(size))
        random.Random(f"{self._context.seed}/{self._context.name}/{epoch}").shuffle(order)
        return order[place * count : (place + 1) * count]

    def _further(self, step: int, *, taken: Collection[int], count: int) -> list[int]:
        """Return at most ``count`` tasks that the step did not take: preferred ones, then new ones, then the others."""
        generator = random.Random(f"{self._context.seed}/{self._context.name}/{step}/further")
        weighted: list[tuple[float, int]] = []
        fresh: list[int] = []
        others: list[int] = []
        for place in range(len(self._context.train)):
            draw = generator.random()  # one for each task, so that what is known of one moves no other
            p = self._levels.share(place)
            weight = 0.0 if p is None or not self._curriculum else WEIGHTS[self._curriculum](p)
            if weight > 0:
                weighted.append((draw ** (1 / weight), place))  # Efraimidis and Spirakis 2006
            else:
                (others if self._curriculum and place in self._levels.means else fresh).append(place)
        weighted.sort(reverse=True)
        generator.shuffle(fresh)
        generator.shuffle(others)
        excluded = set(taken)
        order = [*(place for _, place in weighted), *fresh, *others]
        return [place for place in order if place not in excluded][:count]

    async def _run(self, step: int, places: Sequence[int], *, key: str = "") -> Collected:
        tasks = [self._context.train[place] for place in places]
        return await self._context.collect(tasks, step=step, n=self._n, key=key)

    async def _run_further(self, step: int, places: Sequence[int], *, key: str) -> Collected:
        """Run further tasks; where none of their rollouts can be used, the step goes on with those that it has."""
        try:
            return await self._run(step, places, key=key)
        except RunError:
            return Collected(dropped={"unusable": len(places) * self._n})

    def _rewards(self, episodes: Iterable[Episode], places: Sequence[int]) -> dict[int, list[float]]:
        if not self._curriculum:
            return {}
        by_task = {_canonical(self._context.train[place]): place for place in places}
        found: dict[int, list[float]] = {}
        for episode in episodes:
            place = by_task.get(_canonical(episode.rollout.task))
            if place is not None and episode.reward is not None:
                found.setdefault(place, []).append(episode.reward)
        return found

    def _described(self, places: Sequence[int]) -> dict[str, float]:
        """Return how many tasks were ever drawn, and the mean p of those of a step that were drawn before it."""
        if not self._curriculum:
            return {}
        known = [p for place in places if (p := self._levels.share(place)) is not None]
        return {"tasks_seen": float(len(self._levels.means))} | ({"tasks_level": fmean(known)} if known else {})


def _counts(groups: Sequence[Sequence[Episode]], *, replaced: int, loud: int, wanted: int) -> dict[str, float]:
    """Return the numbers of all of a step's rollouts, in place of those of the groups that it trains on."""
    rewards = [episode.reward for group in groups for episode in group if episode.reward is not None]
    return {
        "reward": fmean(rewards) if rewards else 0.0,
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "rollouts": float(sum(map(len, groups))),
        "groups": float(len(groups)),
        "groups_silent": float(len(groups) - loud),
        "groups_dropped": float(replaced),
        "groups_missing": float(wanted - loud),
    }


def _canonical(task: Json) -> str:
    # A store may return the keys of an object in another order.
    return json.dumps(task, sort_keys=True)
