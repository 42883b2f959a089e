"""The contract of reward emitters, which judge a finished attempt from its recorded spans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agl.schemas import LLM, Reward, Rollout, Span


class RewardEmitter(Protocol):
    """Computes rewards from recorded spans; sees the task's hidden fields."""

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Sequence[Reward] | Reward | float | None:
        """Rewards of one finished attempt; ``None`` for no opinion. May be a coroutine function."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardSetup:
    """Given to a reward emitter besides its parameters, if its entry says ``takes_setup``.

    Attributes:
        folder: The base of relative paths in the experiment.
        policies: The experiment's model servers by name, at their own addresses: a call to one is not recorded as
            an agent's. They have no endpoint while an experiment is only checked.
        build: Makes another reward emitter from its name, or ``module:attribute``, and its parameters.
    """

    folder: Path
    policies: Mapping[str, LLM]
    build: Callable[[str, Mapping[str, Any]], RewardEmitter]
