"""Measures a sample of the rollouts with a better reward, which never trains: a stronger judge, or a person's labels.

A policy can learn to please the reward that trains. A reward that it is not trained on shows that; it may be slow or
expensive, because it sees a sample only. The run compares the two, see :mod:`agl_inspect.records.gold`.
"""

import hashlib
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from agl.contracts import GroupRewardEmitter, RewardSetup
from agl.errors import ConfigError
from agl.schemas import Json, Record, Reward, Rollout, Span
from agl_rewards.composite import rewards_of

_log = logging.getLogger("agl_rewards")


class GoldReward(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reward that measures: an emitter's name, or ``module:attribute``, with its parameters."""

    use: str
    params: dict[str, Json] = {}


class Gold:
    """Gives a sample of the rollouts the rewards of another emitter, marked so that they never train.

    Args:
        reward: The emitter: ``{ use = "...", params = { ... } }``. It should give about the same number as the reward
            that trains where both are right.
        share: The share of the rollouts that are measured. The id of a rollout decides, so a repeated step measures the
            same ones.
        name: The name of the emitter's reward, if it has one reward about the whole rollout.
        setup: The experiment, whose plugins build the emitter.

    Raises:
        ConfigError: The share is not in (0, 1], ``setup`` is missing, or the emitter compares rollouts.
    """

    def __init__(
        self, *, reward: GoldReward, share: float = 0.1, name: str = "gold", setup: RewardSetup | None = None
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"gold measures a share of the rollouts above 0 and at most 1; got share={share:g}")
        if setup is None:
            raise ConfigError("gold builds its reward with an experiment's plugins; pass setup = RewardSetup(...)")
        self._emitter = setup.build(reward.use, reward.params)
        if isinstance(self._emitter, GroupRewardEmitter):
            raise ConfigError(
                f"{reward.use} compares the rollouts of a group, and gold sees a sample of them; use a reward that "
                "scores one rollout, such as judge"
            )
        self._share, self._name = share, name

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
        """Return the emitter's reward about the whole rollout; nothing if it fails, and outside the sample."""
        drawn = int.from_bytes(hashlib.blake2b(f"gold/{rollout.rollout_id}".encode(), digest_size=6).digest())
        if drawn >= self._share * 2**48:
            return []
        try:
            given = await rewards_of(self._emitter, rollout, spans)
        except Exception:  # noqa: BLE001  # whatever the emitter raises: a measurement costs no rollout its training
            _log.warning("the gold reward of rollout %s failed; it is not measured", rollout.rollout_id, exc_info=True)
            return []
        found = [one for one in given if one.scope == "rollout"]
        return [replace(one, name=self._name, is_gold=True) for one in found[:1]]
