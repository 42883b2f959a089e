"""Combines several rewards, the parts, into one: their weighted sum.

Each part is a reward emitter of the experiment's plugins. The experiment's settings decide which reward trains.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agl.contracts import GroupRewardEmitter, RewardEmitter, RewardSetup
from agl.episodes import ScoreOptions, score
from agl.errors import ConfigError, RunError
from agl.schemas import Json, Record, Reward, Rollout, Span


class CompositePart(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward that enters a :class:`Composite`, with its weight.

    Attributes:
        use: A reward emitter's name, or ``module:attribute``.
        weight: The factor of the part in the sum; with 0 the part is recorded as a dimension but does not count.
        params: The emitter's own parameters.
    """

    use: str
    weight: float
    params: dict[str, Json] = {}


class Composite:
    """The weighted sum of its parts; each part is also recorded as a dimension under its own name.

    If a part with a weight has no value, the sum has none either: a missing reward is never counted as 0. Rewards that
    the parts give to turns and spans are passed on and are not in the sum. Parts run one after the other.

    Args:
        parts: The parts by name: ``{ use = "...", weight = 0.3, params = { ... } }``.
        name: The reward's name; by default it is the unnamed reward, which trains.
        setup: The experiment, whose plugins build the parts.

    Raises:
        ConfigError: There are no parts, a weight is not finite, ``setup`` is missing, or a part compares rollouts or is
            ``gold``.
    """

    def __init__(
        self,
        *,
        parts: dict[str, CompositePart],
        name: str = "",
        setup: RewardSetup | None = None,
    ) -> None:
        if not parts:
            raise ConfigError('composite has no parts; write parts.NAME = { use = "...", weight = 0.5 }')
        for label, part in parts.items():
            if part.use == "gold":
                raise ConfigError(
                    f"the part {label!r} of a composite is gold, which never trains; give it a [[reward]]"
                )
            if not math.isfinite(part.weight):
                raise ConfigError(f"composite has the weight {part.weight} for part {label!r}; give a finite number")
        if setup is None:
            raise ConfigError("composite builds its parts with an experiment's plugins; pass setup = RewardSetup(...)")
        self._parts = {label: (part.weight, setup.build(part.use, part.params)) for label, part in parts.items()}
        for label, (_, emitter) in self._parts.items():
            if isinstance(emitter, GroupRewardEmitter):
                raise ConfigError(
                    f"the part {label!r} of a composite compares the rollouts of a group, and a composite sees one "
                    "rollout; give it a [[reward]] of its own, and weigh both with reward_weights of [experiment]"
                )
        self._name = name

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
        """Return the sum, and the rewards of the parts for turns and spans."""
        found = {label: await rewards_of(emitter, rollout, spans) for label, (_, emitter) in self._parts.items()}
        _check_finite(found)
        return [self._sum(found), *_about_calls(found)]

    def _sum(self, found: Mapping[str, Sequence[Reward]]) -> Reward:
        values = {label: score(rewards, options=ScoreOptions()).value for label, rewards in found.items()}
        missing = [label for label, (weight, _) in self._parts.items() if weight and values[label] is None]
        total = sum(weight * (values[label] or 0.0) for label, (weight, _) in self._parts.items())
        return Reward(
            value=None if missing else total,
            name=self._name,
            dimensions={**_inner(found), **values},
            weights={label: weight for label, (weight, _) in self._parts.items()},
            source="evaluator",
            feedback="\n".join(_feedback(found)),
        )


async def rewards_of(emitter: RewardEmitter, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
    """Call a reward emitter, await its result if necessary, and return its rewards; a number gets no name."""
    given: Any = emitter(rollout, spans)
    if inspect.isawaitable(given):
        given = await given
    if given is None:
        return []
    several = cast("list[Any]", list(given) if isinstance(given, list | tuple) else [given])  # pyright: ignore[reportUnknownArgumentType]  # an emitter's return value
    return [item if isinstance(item, Reward) else Reward(value=float(item)) for item in several]


def _check_finite(found: Mapping[str, Sequence[Reward]]) -> None:
    """Raise :class:`RunError` if a part's reward is NaN or infinite, because an error of the sum would not name it."""
    for label, rewards in found.items():
        for reward in rewards:
            if reward.fault:
                raise RunError(
                    f"the part {label!r} of a composite reward returned {reward.fault}; return a finite number, or "
                    "None for none"
                )


def _inner(found: Mapping[str, Sequence[Reward]]) -> dict[str, float | None]:
    """Return the dimensions of the parts' rollout rewards, keyed ``part.dimension``."""
    return {
        f"{label}.{key}": value
        for label, rewards in found.items()
        for reward in rewards
        if reward.scope == "rollout"
        for key, value in reward.dimensions.items()
    }


def _about_calls(found: Mapping[str, Sequence[Reward]]) -> list[Reward]:
    return [reward for rewards in found.values() for reward in rewards if reward.scope != "rollout"]


def _feedback(found: Mapping[str, Sequence[Reward]]) -> list[str]:
    return [
        f"{label}: {reward.feedback}"
        for label, rewards in found.items()
        for reward in rewards
        if reward.scope == "rollout" and reward.feedback
    ]
