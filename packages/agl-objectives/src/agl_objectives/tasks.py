"""Chooses the tasks of a step: shuffles of all of them, or more of those from which the policy learns most now.

Without a curriculum every epoch is a shuffle of all tasks. With one a step draws a share of its tasks from these
shuffles, so that every task comes again and again, and the others at random, with a weight that follows from the share
p of the possible reward that the task's rollouts earned when it was last drawn:

    frontier   p (1 - p)   the variance of a reward of 0 or 1: most where half of the rollouts succeed, none where all
                           or no rollout does (Foster and Foerster 2025, arXiv 2502.12272)
    unsolved   1 - p       the worse, the more often (Kimi k1.5, arXiv 2501.12599, section 2.3.4, prioritized sampling)

Deviations from the papers, and why:
- The frontier's paper runs a large set of candidates again and again to learn their p. Here p comes from the rollouts
  that were trained or dropped, at no cost, and is therefore older.
- Rewards need not lie between 0 and 1: p is the place of a task's mean between the lowest and the highest reward of any
  rollout so far. A change counts half at once, because the policy changes as well.

A draw follows from the seed, the algorithm's name, the step and the saved state alone, so a step that is repeated after
a crash draws the same tasks.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from array import array
from itertools import chain
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Literal

from agl.errors import ConfigError
from agl.hints import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode, Json

__all__ = ["Curriculum", "TaskDraws", "by_task", "canonical", "draw_places"]

Curriculum = Literal["", "frontier", "unsolved"]
"""The tasks that a curriculum prefers; none for `""`."""

UNIFORM = 0.5
"""Share of a step's tasks that is drawn without preference, so that every task comes again."""

PREFERENCES: dict[str, Callable[[float], float]] = {"frontier": lambda p: p * (1 - p), "unsolved": lambda p: 1 - p}
"""The weight of a task whose rollouts earned the share p of the possible reward, by curriculum."""


class TaskDraws:
    """The draws of a run's steps. Call `begin` first.

    Args:
        algorithm: Its registered name, for messages.
        curriculum: The tasks to prefer.

    Raises:
        ConfigError: The curriculum is unknown.
    """

    def __init__(self, algorithm: str, *, curriculum: Curriculum = "") -> None:
        if curriculum and curriculum not in PREFERENCES:
            hint = did_you_mean(curriculum, PREFERENCES, otherwise=f"use one of: {', '.join(PREFERENCES)}.")
            raise ConfigError(f"{algorithm} got curriculum = {curriculum!r}; {hint}")
        self._curriculum: Curriculum = curriculum
        # Single precision for all three: a task that always got the lowest reward is then exactly there.
        self._low, self._high = inf, -inf  # of the rewards of all rollouts so far
        self._means = array("f")  # mean reward of each task, newer ones weighing more; NaN before the first

    def begin(self, context: AlgorithmContext) -> None:
        """Take the tasks and the seed from the algorithm's context."""
        self._context = context
        self._resize()

    def first(self, step: int, count: int) -> list[int]:
        """Return the places in `context.train` of the tasks that a step begins with, none twice.

        There are `count`, or as many as there are tasks.
        """
        if not self._curriculum:
            return draw_places(self._context, step=step, count=count)
        count = min(count, len(self._means))
        shuffled = draw_places(self._context, step=step, count=max(1, round(count * UNIFORM)))
        return shuffled + self.further(step, taken=shuffled, count=count - len(shuffled))

    def further(self, step: int, *, taken: Collection[int], count: int) -> list[int]:
        """Return the places of at most `count` tasks that the step did not take yet, preferred ones first.

        Tasks that were never drawn come next, then the others. The order of what is left over depends on neither
        `taken` nor `count`.
        """
        excluded = set(taken)
        found = (place for place in self._order(step) if place not in excluded)
        return [place for place, _ in zip(found, range(count), strict=False)]

    def note(self, episodes: Sequence[Episode], places: Sequence[int]) -> None:
        """Learn from the rewards of a step's rollouts, whose tasks are at `places`."""
        if not self._curriculum:
            return
        places_of = {canonical(self._context.train[place]): place for place in places}
        rewards: dict[int, list[float]] = {}
        for episode in episodes:
            place = places_of.get(canonical(episode.rollout.task))
            if place is not None and episode.reward is not None:
                rewards.setdefault(place, []).append(episode.reward)
        for place, found in rewards.items():
            mean, before = sum(found) / len(found), self._means[place]
            self._means[place] = mean if isnan(before) else (before + mean) / 2
            self._low, self._high = min(self._low, _single(min(found))), max(self._high, _single(max(found)))

    def metrics(self, places: Sequence[int]) -> dict[str, float]:
        """Return how many tasks were ever drawn, and the mean p of those of a step that were drawn before it."""
        if not self._curriculum:
            return {}
        known = [p for place in places if (p := self._share(place)) is not None]
        seen = sum(not isnan(mean) for mean in self._means)
        return {"tasks_seen": float(seen)} | ({"tasks_level": sum(known) / len(known)} if known else {})

    def state(self) -> dict[str, Json]:
        """Return what was learnt about the tasks as JSON: about 5 bytes for each of them at most."""
        if not self._curriculum or self._low > self._high:
            return {}
        packed = base64.b64encode(zlib.compress(self._means.tobytes())).decode()
        return {"low": self._low, "high": self._high, "means": packed}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from `state`, also with more or fewer tasks at the end, and with a curriculum that was not set."""
        if not self._curriculum or not state:
            return
        self._low, self._high = _single(state["low"]), _single(state["high"])
        self._means = array("f", zlib.decompress(base64.b64decode(str(state["means"]))))
        self._resize()

    def _resize(self) -> None:
        size = len(self._context.train)
        del self._means[size:]
        self._means.extend([nan] * (size - len(self._means)))

    def _share(self, place: int) -> float | None:
        """Return p of a task, `None` before its first rollout or while all rewards are the same."""
        mean = self._means[place]  # NaN without a curriculum
        return None if isnan(mean) or self._low >= self._high else (mean - self._low) / (self._high - self._low)

    def _order(self, step: int) -> Iterator[int]:
        """Return all tasks in the order in which a step wants them."""
        generator = random.Random(f"{self._context.seed}/{self._context.name}/{step}/further")
        weighted: list[tuple[float, int]] = []
        fresh: list[int] = []
        others: list[int] = []
        for place in range(len(self._means)):
            draw = generator.random()  # one for each task, so that what is known of one moves no other
            p = self._share(place)
            weight = 0.0 if p is None else PREFERENCES[self._curriculum](p)
            if weight > 0:
                # Efraimidis and Spirakis 2006: the largest u ** (1 / weight) first are a weighted draw without return.
                weighted.append((draw ** (1 / weight), place))
            else:
                (fresh if isnan(self._means[place]) else others).append(place)
        weighted.sort(reverse=True)
        generator.shuffle(fresh)
        generator.shuffle(others)
        return chain((place for _, place in weighted), fresh, others)


def _single(value: float) -> float:
    """Return a number rounded to single precision."""
    return array("f", [value])[0]


def draw_places(context: AlgorithmContext, *, step: int, count: int) -> list[int]:
    """Return the places in `context.train` of a step's tasks: every epoch is a shuffle by seed, name and epoch.

    No task comes twice in a step, or before every other came once. `count` is cut to the number of tasks. The result
    depends on the step's number alone, so a repeated or resumed step draws the same tasks.
    """
    size = len(context.train)
    count = min(count, size)
    first, order = (step - 1) * count, list[int]()
    for epoch in range(-(-(first + count) // size)):  # rounded up
        fresh = list(range(size))
        random.Random(f"{context.seed}/{context.name}/{epoch}").shuffle(fresh)
        begun = len(order) % count  # tasks of the step that the epochs before leave unfinished
        order += _apart(fresh, set(order[len(order) - begun :]), places=count - begun)
    return order[first : first + count]


def _apart(fresh: Sequence[int], taken: set[int], *, places: int) -> list[int]:
    """Return `fresh` with nothing of `taken` in the first `places`, and its order otherwise as it was."""
    head = [index for index in fresh if index not in taken][:places]
    early = set(head)
    return [*head, *(index for index in fresh if index not in early)]


def canonical(task: Json) -> str:
    """Return a task as text that is the same for equal tasks: a store may return the keys in another order."""
    return json.dumps(task, sort_keys=True)


def by_task(group: Sequence[Episode]) -> dict[str, list[Episode]]:
    """Return the rollouts of a group by their task: with a `group_key` tasks that differ may share a group."""
    found: dict[str, list[Episode]] = {}
    for episode in group:
        found.setdefault(canonical(episode.rollout.task), []).append(episode)
    return found
