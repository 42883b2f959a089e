"""Converts the return values of reward emitters to rewards, for a worker and for scoring recorded rollouts again."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from agl.contracts import GroupRewardEmitter, Recording, RewardEmitter
from agl.errors import GatewayLostError, RewardError, RunError
from agl.schemas import Reward, Rollout, Span
from agl_run.runners.result import read_reward
from agl_run.runners.setup import LostError


async def judged(name: str, emitter: RewardEmitter, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
    """Return the result of :func:`rewards_of`; other errors than losses are raised as :class:`RewardError`.

    Raises:
        RewardError: The emitter failed.
        GatewayLostError, LostError: The emitter raised the error; the attempt has to be repeated.
    """
    try:
        return await rewards_of(name, emitter, rollout, spans)
    except (GatewayLostError, LostError):
        raise
    except Exception as error:  # an emitter may raise anything
        text = str(error)
        # The experiment's own rewards are wrapped already, with their file and line.
        is_named = f"the reward {name!r}" in text
        raise RewardError(
            text if is_named else f"the reward {name!r} failed: {text or type(error).__name__}"
        ) from error


async def compared(name: str, emitter: GroupRewardEmitter, group: Sequence[Recording]) -> list[Reward]:
    """Return the rewards of a group, one for each rollout, with the source ``evaluator``.

    Raises:
        RewardError: The emitter failed, or returned another number of rewards.
    """
    try:
        rewards = [_named(name, reward) for reward in await emitter.compare(group)]
    except Exception as error:  # an emitter may raise anything
        raise RewardError(f"the reward {name!r} failed on a group: {error or type(error).__name__}") from error
    if len(rewards) != len(group):
        raise RewardError(
            f"the reward {name!r} returned {len(rewards)} rewards for {len(group)} rollouts; return one each"
        )
    return rewards


async def rewards_of(name: str, emitter: RewardEmitter, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
    """Call an emitter, await its result if necessary, and return its rewards with the source ``evaluator``.

    Args:
        name: The name for rewards that the emitter returns as plain numbers.
        emitter: The emitter.
        rollout: The rollout with the hidden keys of its task.
        spans: The spans of the attempt.
    Raises:
        TypeError: The emitter returned something other than rewards, numbers and ``None``.
        RunError: A reward is NaN or infinite.
    """
    value: Any = emitter(rollout, spans)
    # An emitter may be a coroutine function, or any callable that returns an awaitable.
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
