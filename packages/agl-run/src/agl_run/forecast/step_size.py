"""Finds how many rollouts a step of an algorithm runs, and how it trains, from its class and its parameters."""

import asyncio
from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any, Protocol, runtime_checkable

from agl.algorithms import AlgorithmConfig
from agl.errors import AglError
from agl.schemas import Weights
from agl_inspect.forecast.costs import StepShape, Training
from agl_run.parts.waiting import steps_in_all
from agl_run.plan import Plan


@runtime_checkable
class SizedAlgorithm(Protocol):
    """An algorithm whose class says how many rollouts a step runs; a plugin needs nothing of this package for it."""

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many tasks a step draws of so many, and how many times it runs each.

        Called on an object that is not set up and is closed afterwards.
        """
        ...


@runtime_checkable
class MeasuredAlgorithm(Protocol):
    """An algorithm that can try out how long its updates take on this machine."""

    def measure_update(self, weights: Weights, rows: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step's updates; blocks for a few seconds, and changes no file.

        Called on an object that is not set up and is closed afterwards.

        Args:
            weights: The policy that it would tune.
            rows: Tokens of each row that has a gradient, and those among them that train.
        """
        ...

    async def close(self) -> None:
        """See :class:`agl.contracts.Algorithm`."""
        ...


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
        token_budget=_number(factory, config, "compute.token_budget"),
    )


def compares_groups(plan: Plan, config: AlgorithmConfig, shape: StepShape | None) -> bool:
    """Return false for an algorithm that compares no rollouts of a task: it runs each once, or has a critic."""
    return (shape is None or shape.samples > 1) and not training_of(plan, config).has_critic


async def measured_update(
    plan: Plan, config: AlgorithmConfig, weights: Weights, rows: Sequence[tuple[int, int]]
) -> float | None:
    """Return the seconds of an algorithm's updates as it measures them here; ``None`` for one that cannot."""
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
    """Return the settings of an algorithm that memory and time depend on; of one without such parameters, the usual."""
    factory = plan.manager.resolve(plan.entry(config))
    rank = _number(factory, config, "lora.rank")
    updates = max(1, _number(factory, config, "updates_per_step"))
    epochs = max(1, _number(factory, config, "epochs"))
    compares = bool(_value(factory, config, "objective.kl_coef")) or _value(factory, config, "reference") == "start"
    return Training(
        dtype=str(_value(factory, config, "compute.dtype") or Training().dtype),
        lora_rank=rank,
        gradient_checkpointing=bool(_value(factory, config, "compute.gradient_checkpointing")),
        token_budget=_number(factory, config, "compute.token_budget"),
        passes=epochs,
        other_passes=int(updates * epochs > 1) + (epochs if compares else 0),
        updates=updates * epochs,
        has_reference=compares and not rank,
        has_critic=_value(factory, config, "critic") is not None,
    )


def _own_size(built: object, tasks: int) -> tuple[int, int] | None:
    return built.step_size(tasks) if isinstance(built, SizedAlgorithm) else None


def _number(factory: Any, config: AlgorithmConfig, name: str) -> int:
    """Return an integer parameter or its default; 0 without one."""
    found = _value(factory, config, name)
    return found if isinstance(found, int) else 0


def _value(factory: Any, config: AlgorithmConfig, name: str) -> Any:
    """Return a parameter or its default, such as ``lora.rank`` in a table; ``None`` if the algorithm has none."""
    name, _, key = name.partition(".")
    try:
        default = signature(factory).parameters[name].default
    except (KeyError, TypeError, ValueError):
        return None
    if key:
        return config.params.get(name, {}).get(key, getattr(default, key, None))
    return config.params.get(name, None if default is Parameter.empty else default)
