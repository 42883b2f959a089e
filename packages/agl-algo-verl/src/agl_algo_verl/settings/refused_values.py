"""Values that VERL accepts and this package refuses, such as names of losses, and what to use instead.

Every advantage estimator and policy loss that VERL 0.9.1 registers is either accepted by `settings.py` or listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_GRADIENT = "as a term of the loss its gradient is 0 on average; use low_var_kl, or kl+"

ESTIMATORS = {
    "gdpo": "it normalises each of several rewards alone, and credit gives one number; weigh them by the experiment's "
    "`reward_weights` and use grpo",
    "optimal_token_baseline": "it needs the norm of the gradient of every token, which the engine does not give; use "
    "gae",
    "tir_optimal_token_baseline": "it needs the norm of the gradient of every token, which the engine does not give; "
    "use gae",
}
"""Advantage estimators of VERL that are refused, with what they lack and what to use instead."""

LOSSES = {
    "bypass_mode": "it takes the recorded log-probabilities for the old ones, which "
    "algorithm.rollout_correction.bypass_mode = true does for every loss; use that with vanilla",
}
"""Policy losses of VERL that are refused, likewise."""

REFUSED: dict[str, dict[str, str]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": LOSSES,
    "actor_rollout_ref.actor.loss_agg_mode": {
        "token-sum": "its gradient grows with the batch; use seq-mean-token-sum",
    },
    "algorithm.kl_penalty": {"full": "VERL names it and does not implement it; use k1 or k3"},
    "actor_rollout_ref.actor.kl_loss_type": {
        "full": "VERL names it and does not implement it; use low_var_kl",
        "kl": _NO_GRADIENT,
        "k1": _NO_GRADIENT,
    },
    "algorithm.rollout_correction.loss_type": {
        "reinforce": 'its weight has the policy in training; use bypass_mode with loss = "cispo" and loss_params = '
        "{clip_low = 1.0, clip_high = rollout_is_threshold - 1}, which is the same",
    },
    "trainer.v1.trainer_mode": {
        "separate_async": "it needs devices of its own for serving; use colocate_async",
    },
}
"""The refused values of each key, with the reason and what to use instead."""


def check_values(given: Mapping[str, Any]) -> None:
    """Raise ConfigError naming every refused value among nested keys, with what to use instead."""
    wrong: list[str] = []
    for name, values in REFUSED.items():
        value = _value(given, name)
        if isinstance(value, str) and value in values:
            wrong.append(f"{name} = {value!r}: {values[value]}")
    if wrong:
        raise ConfigError("The VERL configuration has values that cannot be used here:\n- " + "\n- ".join(wrong))


def _value(given: Mapping[str, Any], name: str) -> Any:
    level: Any = given
    for part in name.split("."):
        if not isinstance(level, dict):
            return None
        level = cast("dict[str, Any]", level).get(part)
    return level
