"""Finds how many rollouts a step of an algorithm runs, from its class and the parameters in the experiment."""

from inspect import Parameter, signature
from typing import Any, Protocol, runtime_checkable

from agl.algorithms import AlgorithmConfig
from agl.schemas import Record
from agl_run.experiment.plan import Plan
from agl_run.experiment.waiting import steps_in_all


@runtime_checkable
class SizedAlgorithm(Protocol):
    """An algorithm whose class says how many rollouts a step runs; a plugin needs nothing of this package for it."""

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many tasks a step draws of so many, and how many times it runs each.

        Called on an object that is not set up and is closed afterwards.
        """
        ...


class StepShape(Record, frozen=True, kw_only=True):
    """The size of a step.

    Attributes:
        tasks: Tasks per step.
        samples: Rollouts per task.
        steps: Steps in all; 0 if the algorithm sets no limit.
        token_budget: Tokens that one pass may compute; 0 where there is no such limit.
    """

    tasks: int
    samples: int
    steps: int = 0
    token_budget: int = 0

    @property
    def rollouts(self) -> int:
        """Rollouts per step."""
        return self.tasks * self.samples


async def shape_of(plan: Plan, config: AlgorithmConfig) -> StepShape | None:
    """Return the size of an algorithm's step; ``None`` for one that does not say, or collects nothing itself.

    It is what the method ``step_size`` returns where the algorithm has one, and otherwise the parameters
    ``tasks_per_step`` and ``group_size``.

    Raises:
        ConfigError: A parameter is unknown or has the wrong type.
        PluginError: A module that the algorithm needs is not installed.
    """
    if config.source:
        return None
    entry = plan.entry(config)
    built = plan.manager.build(entry, **config.params)
    size = _own_size(built, len(plan.train))
    await built.close()
    factory = plan.manager.resolve(entry)
    tasks, samples = size or (_number(factory, config, "tasks_per_step"), _number(factory, config, "group_size"))
    if not tasks or not samples:
        return None
    return StepShape(
        tasks=min(tasks, len(plan.train)) if plan.train else tasks,
        samples=samples,
        steps=steps_in_all(factory, config.params),
        token_budget=_number(factory, config, "token_budget"),
    )


def _own_size(built: object, tasks: int) -> tuple[int, int] | None:
    return built.step_size(tasks) if isinstance(built, SizedAlgorithm) else None


def _number(factory: Any, config: AlgorithmConfig, name: str) -> int:
    """Return an integer parameter or its default; 0 without one."""
    try:
        default = signature(factory).parameters[name].default
    except (KeyError, TypeError, ValueError):
        return 0
    found = config.params.get(name, None if default is Parameter.empty else default)
    return found if isinstance(found, int) else 0
