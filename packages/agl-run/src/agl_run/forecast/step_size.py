"""Derives an algorithm's rollouts per step and its training costs from its class and parameters."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agl.algorithms import AlgorithmConfig
from agl.errors import AglError
from agl.schemas import Weights
from agl_inspect.forecast.costs import StepShape, Training
from agl_inspect.forecast.fitting import SETTABLE, VERL
from agl_run.parts.build import NotStartedError, unstarted_context
from agl_run.parts.waiting import parameter, steps_in_all
from agl_run.plan import Plan


@runtime_checkable
class MeasuredAlgorithm(Protocol):
    """An algorithm that can measure the time of its updates on this machine."""

    def measure_update(self, weights: Weights, rows: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step's updates; blocks for a few seconds, and changes no file.

        The method is called before ``setup``, and the algorithm is closed afterwards.

        Args:
            weights: The weights of the policy that the algorithm would tune.
            rows: One pair per row with a gradient: the number of its tokens and of its trained tokens.
        """
        ...

    async def close(self) -> None:
        """Close the algorithm; see :class:`agl.contracts.Algorithm`."""
        ...


async def shape_of(plan: Plan, config: AlgorithmConfig) -> StepShape | None:
    """Return the size of an algorithm's step; ``None`` if it is unknown or the algorithm collects no rollouts itself.

    An algorithm may have a method ``step_size(tasks)``. It gets the number of training tasks, and returns the number
    of tasks in a step and of rollouts per task; it is called before ``setup``, and the algorithm is closed afterwards.
    Without this method, the parameters ``tasks_per_step`` and ``group_size`` count.

    Raises:
        ConfigError: A parameter is unknown or has the wrong type.
        PluginError: A module that the algorithm needs is not installed.
    """
    if config.source:
        return None
    entry = plan.entry(config)
    built: Any = plan.manager.build(entry, **config.params)
    size = built.step_size(len(plan.train)) if hasattr(built, "step_size") else None
    await built.close()
    factory = plan.manager.resolve(entry)
    tasks, samples = size or (_number(factory, config, "tasks_per_step"), _number(factory, config, "group_size"))
    if not tasks or not samples:
        return None
    return StepShape(
        tasks=min(tasks, len(plan.train)) if plan.train else tasks,
        samples=samples,
        steps=steps_in_all(factory, config.params),
        token_budget=_number(factory, config, "compute.token_budget"),
    )


async def run_size_of(plan: Plan, config: AlgorithmConfig) -> tuple[int, int]:
    """Return the largest number of rollouts of a whole run of an algorithm, and the number of its steps.

    An algorithm whose steps have no fixed size may have a method ``run_size(context)`` that returns both numbers. It
    gets the context of :meth:`agl.contracts.CheckedAlgorithm.check`. A number that is not known is 0.
    """
    built: Any = plan.manager.build(plan.entry(config), **config.params)
    try:
        return built.run_size(unstarted_context(plan, config)) if hasattr(built, "run_size") else (0, 0)
    except NotStartedError:  # it needs a part of a running experiment
        return 0, 0
    finally:
        await built.close()


def compares_groups(plan: Plan, config: AlgorithmConfig, shape: StepShape | None) -> bool:
    """Return true if the algorithm compares rollouts of a task with each other.

    It does not if a step has one rollout per task, or if the algorithm has a critic.
    """
    return (shape is None or shape.samples > 1) and not training_of(plan, config).has_critic


async def measured_update(
    plan: Plan, config: AlgorithmConfig, weights: Weights, rows: Sequence[tuple[int, int]]
) -> float | None:
    """Measure the seconds of an algorithm's updates on this machine; ``None`` if the algorithm cannot measure them."""
    built: object = plan.manager.build(plan.entry(config), **config.params)
    if not isinstance(built, MeasuredAlgorithm) or not rows:
        return None
    try:
        return await asyncio.to_thread(built.measure_update, weights, rows)
    except AglError:  # the weights are elsewhere, or a part of the algorithm is not installed
        return None
    finally:
        await built.close()


def training_of(plan: Plan, config: AlgorithmConfig) -> Training:
    """Return the settings of an algorithm that determine memory and time; missing parameters get default values."""
    factory = plan.manager.resolve(plan.entry(config))
    rank = _number(factory, config, "lora.rank")
    updates = max(1, _number(factory, config, "updates_per_step"))
    epochs = max(1, _number(factory, config, "epochs"))
    compares = (
        bool(parameter(factory, config.params, "objective.kl_coef"))
        or parameter(factory, config.params, "reference") == "start"
    )
    return Training(
        dtype=str(parameter(factory, config.params, "compute.dtype") or Training().dtype),
        lora_rank=rank,
        is_quantized=bool(parameter(factory, config.params, "lora.is_quantized")),
        gradient_checkpointing=parameter(factory, config.params, "compute.gradient_checkpointing") or False,
        moments=parameter(factory, config.params, "optim.moments") or "float32",
        token_budget=_number(factory, config, "compute.token_budget"),
        passes=epochs,
        other_passes=int(updates * epochs > 1) + (epochs if compares else 0),
        updates=updates * epochs,
        has_reference=compares and not rank,
        has_critic=parameter(factory, config.params, "critic") is not None,
    )


def settable_of(plan: Plan, config: AlgorithmConfig) -> list[str]:
    """Return what a proposal may change: its own parameters, and VERL for policy gradients on rewards."""
    factory = plan.manager.resolve(plan.entry(config))
    found = [name for name in SETTABLE if parameter(factory, config.params, name) is not None]
    learns_from_rewards = parameter(factory, config.params, "objective.kl_coef") is not None
    return [*found, VERL] if learns_from_rewards or config.use == "verl" else found


def _number(factory: Any, config: AlgorithmConfig, name: str) -> int:
    """Return the value of an integer parameter, or its default; 0 if the algorithm has no such parameter."""
    found = parameter(factory, config.params, name)
    return found if isinstance(found, int) else 0
