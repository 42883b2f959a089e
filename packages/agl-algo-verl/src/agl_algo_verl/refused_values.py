"""Values that VERL accepts and this package refuses, such as names of losses, and what to use instead.

Every advantage estimator and policy loss that VERL 0.9.1 registers is either accepted by `settings.py` or listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_GRADIENT = "as a term of the loss its gradient is 0 on average; use low_var_kl, or kl+"
_CLIPPED = "use vanilla, with clip_ratio_low and clip_ratio_high for DAPO's bounds, or gspo"

ESTIMATORS = {
    "grpo_vectorized": "it gives the numbers of grpo; use grpo",
    "rloo_vectorized": "it gives the numbers of rloo; use rloo",
    "grpo_passk": "it rewards only the best of a group; use grpo",
    "gdpo": "it normalises each of several rewards alone; weigh them by the experiment's `reward_weights` and use grpo",
    "opo": "it weighs rollouts by their length, and the calls of an agent have no length in common; use rloo",
    "remax": "it needs a greedy rollout beside every sampled one; use rloo",
    "gpg": "it rescales by the rollouts that differ; use grpo with norm_adv_by_std_in_grpo = false",
    "optimal_token_baseline": "it needs the norms of gradients per token; use gae",
    "tir_optimal_token_baseline": "it needs the norms of gradients per token; use gae",
}
"""Advantage estimators of VERL that are refused, with the reason and what to use instead."""

LOSSES = {
    "bypass_mode": "old log-probabilities are always the engine's; use vanilla with rollout_correction.rollout_is",
    "cispo": _CLIPPED,
    "clip_cov": _CLIPPED,
    "dppo_kl": _CLIPPED,
    "dppo_tv": _CLIPPED,
    "dro": _CLIPPED,
    "geo_mean": _CLIPPED,
    "gpg": _CLIPPED,
    "kl_cov": _CLIPPED,
    "sapo": _CLIPPED,
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
    "algorithm.rollout_correction.rollout_is": {
        "sequence": "it would multiply over an agent's rows, not its rollouts; use token",
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
