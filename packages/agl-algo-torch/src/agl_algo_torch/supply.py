"""Supplies a step with groups of rollouts: the algorithm collects its own, or reads those of another algorithm.

`dpo`, `ipo`, `kto` and `rft` share it; they learn equally well from rollouts that somebody else paid for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agl.errors import ConfigError
from agl_algo_torch.learner import mean
from agl_algo_torch.tuned_policy import at_least_one, check_tasks, draw_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode, Json

STEPS, TASKS_PER_STEP, GROUP_SIZE = 1, 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppliedGroups:
    """Groups of rollouts that share a task, and metrics to log.

    `stop_reason` says why no further step will have rollouts; it is empty while one may.
    """

    groups: list[list[Episode]]
    metrics: dict[str, float]
    stop_reason: str = ""


class RolloutSupply:
    """The rollouts of an algorithm that may have a source. Call `begin` first.

    Args:
        algorithm: Its registered name, for messages.
        steps: Steps in all; `None` for 1, or with a source for as many as it has rollouts for.
        tasks_per_step: Groups that it collects per step, with `group_size` rollouts each; `None` for the defaults.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
    """

    def __init__(
        self, *, algorithm: str, steps: int | None, tasks_per_step: int | None, group_size: int | None, max_age: int
    ) -> None:
        given = {"steps": steps, "tasks_per_step": tasks_per_step, "group_size": group_size}
        at_least_one(algorithm, **{name: value for name, value in given.items() if value is not None})
        if max_age < -1:
            raise ConfigError(f"{algorithm} got max_age = {max_age}; give a number of versions, or -1 for any.")
        self._algorithm = algorithm
        self._steps, self._tasks_per_step, self._group_size = steps, tasks_per_step, group_size
        self._max_age = max_age
        self._after: dict[str, int] = {}
        self._is_over = False

    def begin(self, context: AlgorithmContext) -> None:
        """Take the algorithm's context; raises ConfigError for settings that would be ignored."""
        self._context = context
        name = self._algorithm
        if not context.sources:
            check_tasks(context, algorithm=name)
            if self._max_age >= 0:
                raise ConfigError(f"{name} got max_age without a source; its own rollouts are never old. Remove it.")
        elif self._tasks_per_step or self._group_size:
            raise ConfigError(
                f"{name} learns from {list(context.sources)} and collects nothing, so tasks_per_step and group_size "
                "would be ignored; remove them, or remove the source."
            )

    def size(self, tasks: int) -> tuple[int, int]:
        """Return how many of so many tasks a step draws, and how many times it runs each."""
        return min(tasks, self._tasks_per_step or TASKS_PER_STEP), self._group_size or GROUP_SIZE

    async def take(self, step: int) -> SuppliedGroups:
        """Return the groups of a step; from sources, all that are new since the last step."""
        context = self._context
        if context.sources:
            found = await context.recorded(after=self._after, max_age=None if self._max_age < 0 else self._max_age)
            groups, dropped = found.groups(), found.dropped
            self._after, self._is_over = found.steps, found.is_over
        else:
            tasks = draw_tasks(context, step=step, count=self._tasks_per_step or TASKS_PER_STEP)
            collected = await context.collect(tasks, step=step, n=self._group_size or GROUP_SIZE)
            groups, dropped = collected.groups(), collected.dropped
        rewards = [e.reward for group in groups for e in group if e.reward is not None]
        metrics = {"reward": mean(rewards), "groups": float(len(groups)), "rollouts": float(len(rewards))}
        metrics |= {f"dropped_{why}": float(count) for why, count in dropped.items()}
        return SuppliedGroups(groups=groups, metrics=metrics, stop_reason=self._reason(step))

    def state(self) -> dict[str, Json]:
        """Return how far the sources were read, and if they are exhausted."""
        return {"after": dict(self._after), "is_over": self._is_over}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue reading where `state` was taken."""
        self._after = dict(state["after"])

    def has_more(self, state: Mapping[str, Json], *, step: int, sources_go_on: bool) -> bool:
        """Return true when another step follows the last one, `step`, whose state is `state`."""
        # Exhausted sources stay so until their algorithm runs on; then `steps` is still the limit.
        if state["is_over"]:
            return sources_go_on and (self._steps is None or step < self._steps)
        return step < (self._steps or STEPS)

    def _reason(self, step: int) -> str:
        if self._is_over:
            return "the sources have nothing more"
        limit = self._steps or (None if self._context.sources else STEPS)
        return f"{step} steps done" if step == limit else ""
