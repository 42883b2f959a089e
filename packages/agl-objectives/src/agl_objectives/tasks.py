"""Chooses the tasks of a step: from shuffles of all tasks, or with a preference for tasks that teach the policy most.

Without a curriculum every epoch is a shuffle of all tasks. With a curriculum a step draws half of its tasks from these
shuffles, so that every task recurs, and the other half at random by weight. The weight of a task follows from p, the
share of the possible reward that its rollouts earned when it was last drawn:

    frontier   p (1 - p)   the variance of a reward of 0 or 1, which is largest if half of the rollouts succeed, and 0
                           if all or none do (Foster and Foerster 2025, arXiv 2502.12272)
    unsolved   1 - p       larger for lower rewards (Kimi k1.5, arXiv 2501.12599, section 2.3.4, prioritized sampling)

Deviations from the papers, and why:
- The paper on `frontier` runs a large set of candidate tasks repeatedly to estimate p. Here p comes at no cost from the
  rollouts that were trained or dropped, and is therefore older.
- Rewards need not lie between 0 and 1, so p is the position of a task's mean reward between the lowest and the highest
  reward of any rollout so far. A new mean is averaged with the one before, because the policy changes as well.

A draw depends only on the seed, the algorithm's name, the step and the saved state, so a step that is repeated after a
crash draws the same tasks.
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
"""Name of a curriculum; `""` for none."""

UNIFORM = 0.5
"""Share of a step's tasks that are drawn without preference, so that every task recurs."""

PREFERENCES: dict[str, Callable[[float], float]] = {"frontier": lambda p: p * (1 - p), "unsolved": lambda p: 1 - p}
"""The weight of a task by curriculum, as a function of p, the share of the possible reward that it earned."""


class TaskDraws:
    """Draws the tasks of a run's steps. Call `begin` first.

    Args:
        algorithm: The algorithm's registered name, for messages.
        curriculum: The curriculum; `""` for none.

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
        """Return the indices in `context.train` of a step's first tasks, without repetition.

        There are `count` of them, or all tasks if there are fewer.
        """
        if not self._curriculum:
            return draw_places(self._context, step=step, count=count)
        count = min(count, len(self._means))
        shuffled = draw_places(self._context, step=step, count=max(1, round(count * UNIFORM)))
        return shuffled + self.further(step, taken=shuffled, count=count - len(shuffled))

    def further(self, step: int, *, taken: Collection[int], count: int) -> list[int]:
        """Return the indices of at most `count` tasks that are not in `taken`, the tasks that the step has drawn.

        Preferred tasks come first, then tasks that were never drawn, then the others. The order depends on neither
        `taken` nor `count`.
        """
        excluded = set(taken)
        found = (place for place in self._order(step) if place not in excluded)
        return [place for place, _ in zip(found, range(count), strict=False)]

    def note(self, episodes: Sequence[Episode], places: Sequence[int]) -> None:
        """Update the mean rewards of the tasks at the indices `places` from a step's rollouts."""
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
        """Return metrics: the number of tasks drawn so far, and the mean p of those tasks of the step that have one."""
        if not self._curriculum:
            return {}
        known = [p for place in places if (p := self._share(place)) is not None]
        seen = sum(not isnan(mean) for mean in self._means)
        return {"tasks_seen": float(seen)} | ({"tasks_level": sum(known) / len(known)} if known else {})

    def state(self) -> dict[str, Json]:
        """Return the tasks' mean rewards as JSON, at most about 5 bytes per task; empty without a curriculum."""
        if not self._curriculum or self._low > self._high:
            return {}
        packed = base64.b64encode(zlib.compress(self._means.tobytes())).decode()
        return {"low": self._low, "high": self._high, "means": packed}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Restore `state`, if it is not empty; tasks may have been added or removed at the end since it was taken."""
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
        """Return a task's p (see the module); `None` before its first rollout, or while all rewards are equal."""
        mean = self._means[place]  # NaN without a curriculum
        return None if isnan(mean) or self._low >= self._high else (mean - self._low) / (self._high - self._low)

    def _order(self, step: int) -> Iterator[int]:
        """Return the indices of all tasks in the order in which a step prefers them."""
        generator = random.Random(f"{self._context.seed}/{self._context.name}/{step}/further")
        weighted: list[tuple[float, int]] = []
        fresh: list[int] = []
        others: list[int] = []
        for place in range(len(self._means)):
            draw = generator.random()  # one per task, so that the mean of one task does not change another's draw
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
    """Return the indices in `context.train` of a step's tasks: every epoch is a shuffle by seed, name and epoch.

    No task is drawn twice in a step, or again before all others were drawn. At most all tasks are drawn. The result
    depends only on seed, name, step and count, so a repeated or resumed step draws the same tasks.
    """
    size = len(context.train)
    count = min(count, size)
    first, order = (step - 1) * count, list[int]()
    for epoch in range(-(-(first + count) // size)):  # rounded up
        fresh = list(range(size))
        random.Random(f"{context.seed}/{context.name}/{epoch}").shuffle(fresh)
        begun = len(order) % count  # tasks of a step that begins in the epoch before and ends in this one
        order += _apart(fresh, set(order[len(order) - begun :]), places=count - begun)
    return order[first : first + count]


def _apart(fresh: Sequence[int], taken: set[int], *, places: int) -> list[int]:
    """Move up to `places` indices that are not in `taken` to the front of `fresh`; the order is otherwise unchanged."""
    head = [index for index in fresh if index not in taken][:places]
    early = set(head)
    return [*head, *(index for index in fresh if index not in early)]


def canonical(task: Json) -> str:
    """Return a task as text that is the same for equal tasks, because a store may return the keys in another order."""
    return json.dumps(task, sort_keys=True)


def by_task(group: Sequence[Episode]) -> dict[str, list[Episode]]:
    """Return the rollouts of a group by task, as text; with a `group_key` a group may have several tasks."""
    found: dict[str, list[Episode]] = {}
    for episode in group:
        found.setdefault(canonical(episode.rollout.task), []).append(episode)
    return found
