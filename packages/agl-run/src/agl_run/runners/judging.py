"""Turns what a reward emitter returns into rewards: for a worker, and when recorded rollouts are scored again."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from agl.contracts import RewardEmitter
from agl.errors import RunError
from agl.schemas import Reward, Rollout, Span
from agl_run.runners.result import read_reward


async def rewards_of(name: str, emitter: RewardEmitter, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
    """Call an emitter, await what it returns if need be, and return its rewards with the source ``evaluator``.

    Args:
        name: The name of rewards that the emitter returns as plain numbers.
        emitter: The emitter.
        rollout: The rollout with its hidden task fields.
        spans: The records of the attempt.

    Raises:
        TypeError: The emitter returned something other than rewards, numbers and ``None``.
        RunError: A reward is NaN or infinite.
    """
    value: Any = emitter(rollout, spans)
    if inspect.isawaitable(value):
        value = await value
    if value is None:
        return []
    rewards = cast("list[Any]", list(value) if isinstance(value, list | tuple) else [value])  # pyright: ignore[reportUnknownArgumentType]  # a plugin's return value
    return [_named(name, item) for item in rewards]


def _named(name: str, value: Any) -> Reward:
    reward = read_reward(value)
    if reward is None:
        raise TypeError(f"the reward {name!r} returned {type(value).__name__}; return a number or a Reward")
    if reward.fault:
        raise RunError(f"the reward {name!r} returned {reward.fault}; return a finite number, or None for no reward")
    return msgspec.structs.replace(reward, name=reward.name if isinstance(value, Reward) else name, source="evaluator")
