"""Marks rollouts in which policies answer at temperature 0, whatever the agent requests.

The mark is in the rollout's metadata, and the gateway obeys it. Some algorithms compare sampled rollouts with a greedy
rollout of the same task. Greedy rollouts never train.
"""

from collections.abc import Iterable
from typing import cast

import msgspec

from agl.errors import ConfigError
from agl.schemas import Rollout

__all__ = ["as_greedy", "greedy_policies"]

_KEY = "agl.greedy"


def as_greedy(rollout: Rollout, policies: Iterable[str]) -> Rollout:
    """Return a copy of a rollout in which the named policies answer at temperature 0.

    Raises:
        ConfigError: The rollout's mode is ``train``.
    """
    # A greedy answer has no log-probability of a draw, so no gradient could be corrected for it.
    if rollout.mode == "train":
        raise ConfigError(f"the rollout {rollout.rollout_id} trains, and greedy answers teach nothing; use mode 'test'")
    return msgspec.structs.replace(rollout, metadata={**rollout.metadata, _KEY: list(policies)})


def greedy_policies(rollout: Rollout) -> frozenset[str]:
    """Return the policies that answer at temperature 0 in this rollout; empty if it is not a greedy rollout."""
    named = rollout.metadata.get(_KEY)
    return frozenset(str(name) for name in cast("list[object]", named)) if isinstance(named, list) else frozenset()
