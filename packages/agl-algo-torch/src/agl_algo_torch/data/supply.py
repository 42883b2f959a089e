"""Supplies a step with groups of rollouts: the algorithm collects its own, or reads those of another algorithm.

`dpo`, `ipo`, `kto` and `rft` use it, because they can also learn from rollouts that another algorithm has collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from agl.errors import ConfigError
from agl_algo_torch.learner.policy_learner import mean
from agl_algo_torch.learner.tuned_policy import check_tasks
from agl_objectives.groups import GroupSampler, Silence
from agl_objectives.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Episode, Json
    from agl_algo_torch.learner.tuned_policy import TunedPolicy

STEPS, TASKS_PER_STEP, GROUP_SIZE = 1, 16, 4

Age = Annotated[int, msgspec.Meta(ge=-1)]
"""How many versions of the policy a rollout may be behind; -1 for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppliedGroups:
    """The groups of one step.

    Attributes:
        groups: The rollouts, by task.
        metrics: Metrics to log.
        stop_reason: Why this is the last step; empty if there may be another one.
        uses: The uses of the calls in groups that were replaced, by rollout id.
    """

    groups: list[list[Episode]]
    metrics: dict[str, float]
    stop_reason: str = ""
    uses: dict[str, tuple[CallUse, ...]] = field(default_factory=dict[str, "tuple[CallUse, ...]"])

    @property
    def episodes(self) -> list[Episode]:
        """The rollouts of all groups, in order."""
        return [episode for group in self.groups for episode in group]


class RolloutSupply:
    """Supplies an algorithm with rollouts that it collects itself or that its source has collected. Call `begin` first.

    Args:
        algorithm: The algorithm's registered name, for messages.
        steps: Largest number of steps. `None` means 1 without a source, and no limit with one.
        tasks_per_step: Groups per step, if the algorithm collects them; `None` for 16.
        group_size: Rollouts per group, if the algorithm collects them; `None` for 4.
        max_age: With a source, how many versions of the tuned policy a rollout may be behind; -1 for no limit.
        sampling: The choice of tasks, and the rounds of replacing silent groups; refused with a source.
        silence: Defines silent groups; by default those whose rewards do not differ.
    """

    def __init__(
        self,
        algorithm: str,
        *,
        steps: int | None,
        tasks_per_step: int | None,
        group_size: int | None,
        max_age: int,
        sampling: Sampling = Sampling(),
        silence: Silence | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._steps, self._tasks_per_step, self._group_size = steps, tasks_per_step, group_size
        self._max_age = max_age
        self._groups = GroupSampler(
            algorithm,
            count=tasks_per_step or TASKS_PER_STEP,
            n=group_size or GROUP_SIZE,
            refill=sampling.refill,
            silence=silence,
            curriculum=sampling.curriculum,
            max_age=max_age,
        )

    @property
    def given(self) -> dict[str, bool]:
        """For each setting of the supply, by name, whether the user set it."""
        return {
            "tasks_per_step": self._tasks_per_step is not None,
            "group_size": self._group_size is not None,
            "max_age": self._max_age >= 0,
        }

    @property
    def own_steps(self) -> int:
        """Number of steps if the algorithm collects its own rollouts."""
        return self._steps or STEPS

    def begin(self, context: AlgorithmContext) -> None:
        """Prepare the supply for a run; raises ConfigError for settings that would have no effect."""
        self._context = context
        name = self._algorithm
        self._groups.begin(context)
        if not context.sources:
            check_tasks(context, algorithm=name)
            if self._max_age >= 0:
                raise ConfigError(f"{name} got max_age without a source; its own rollouts are never old. Remove it.")

    def size(self, tasks: int) -> tuple[int, int]:
        """Return how many of `tasks` tasks a step draws, and how many rollouts it collects per task."""
        return min(tasks, self._tasks_per_step or TASKS_PER_STEP), self._group_size or GROUP_SIZE

    async def take(self, step: int) -> SuppliedGroups:
        """Return the groups of a step: newly collected ones, or the sources' rollouts since the last step."""
        sampled = await self._groups.collect(step)
        rewards = [e.reward for group in sampled.groups for e in group if e.reward is not None]
        metrics = {"reward": mean(rewards), "groups": float(len(sampled.groups)), "rollouts": float(len(rewards))}
        metrics |= sampled.metrics  # with rounds, those of all rollouts that were collected
        return SuppliedGroups(groups=sampled.groups, metrics=metrics, stop_reason=self._reason(step), uses=sampled.uses)

    def state(self) -> dict[str, Json]:
        """Return how far the sources were read and whether they are exhausted, or the state of the curriculum."""
        return {"groups": self._groups.state()}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue reading the sources from the position in `state`, and restore the curriculum."""
        self._groups.restore(state.get("groups", {}))

    def has_more(self, state: Mapping[str, Json], *, step: int, sources_go_on: bool) -> bool:
        """Return true if another step follows step number `step`, after which the supply has the state `state`."""
        # Exhausted sources have new rollouts only if their algorithms go on; `steps` limits the steps even then.
        if state["groups"].get("is_over"):
            return sources_go_on and (self._steps is None or step < self._steps)
        return step < self.own_steps

    def _reason(self, step: int) -> str:
        if self._groups.is_over:
            return "the sources have nothing more"
        limit = self._steps or (None if self._context.sources else STEPS)
        return f"reached steps = {step}" if step == limit else ""


class Supplied:
    """Base of the algorithms that learn from a `RolloutSupply`; it lacks only the step.

    Subclasses set `_supply` and `_tuned`, and implement `step`.
    """

    _supply: RolloutSupply
    _tuned: TunedPolicy

    async def setup(self, context: AlgorithmContext) -> None:
        """Prepare the policy and the supply.

        Raises ConfigError unless exactly one policy is tuned, its weights can be trained in this process, and every
        supply setting has an effect.
        """
        self._context = context
        self._supply.begin(self._tuned.begin(context))

    def state(self) -> Mapping[str, Json]:
        """Return the states of the supply (`RolloutSupply.state`) and of the tuned policy (`TunedPolicy.state`)."""
        return self._supply.state() | self._tuned.state()

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights, optimizer moments, reference model, and position in the sources."""
        self._supply.restore(state)
        await self._tuned.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Return to the weights and optimizer moments of an earlier state, with `rate` times the learning rate."""
        await self._tuned.go_back(state, rate=rate)

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of `tasks` tasks a step draws, and how many rollouts per task, for `agl check --forecast`."""
        return self._supply.size(tasks)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if another step follows: `steps` is not reached, and the sources have or will have rollouts."""
        del tasks
        return self._supply.has_more(state, step=int(state["step"]), sources_go_on=sources_go_on)

    async def close(self) -> None:
        """Release the models."""
        self._tuned.close()
