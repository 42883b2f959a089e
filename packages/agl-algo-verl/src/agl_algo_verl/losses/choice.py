"""The loss and the estimator of a run, by their names in agl-objectives or by VERL's own keys.

`loss`, `loss_params`, `estimator` and `estimator_params` name any loss and estimator that `grpo` of agl-algo-torch
takes. VERL's names mean the same functions; their numbers are VERL's where a rollout has one row and an update one
micro-batch:

    adv_estimator                          estimator        policy_loss.loss_mode    loss
    grpo, grpo_vectorized                  grpo, dr_grpo    cispo                    cispo
    rloo, rloo_vectorized                  rloo             sapo                     sapo
    reinforce_plus_plus                    reinforce++      geo_mean                 gmpo
    reinforce_plus_plus_baseline           the same         clip_cov, kl_cov         clip-cov, kl-cov
    opo, gpg, grpo_passk                   the same         dppo_tv, dppo_kl         dppo
    remax                                  remax            gpg, dro                 gpg, dro

`vanilla` and `gspo` stay VERL's own functions, and `gae` its own estimator.

Deviations from VERL, and why:
- Scores count rollouts, never rows, and a group of one has nothing to compare with and gets 0, where VERL gives it the
  score itself (`agl_objectives.estimators`).
- REINFORCE++ whitens over the tokens of the batch. Here each score counts once, so a long rollout weighs no more.
- Means over sequences, and the ratios of `geo_mean`, are over rollouts. Tokens of high covariance are chosen among all
  those of an update, where VERL compares those of a micro-batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from agl_objectives.registry import find_estimator, find_loss, is_own_loss
from agl_objectives.reports import UnusedEstimator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agl_algo_verl.settings.settings import ActorKeys, VerlSettings
    from agl_objectives.aggregation import Aggregation
    from agl_objectives.registry import FoundEstimator, FoundLoss

ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_passk",
    "remax": "remax",
}
"""VERL's names of estimators, and ours of the same functions."""

OVER_SEQUENCES = ("sapo", "geo_mean")
"""VERL's losses that are a mean over sequences, whatever `loss_agg_mode` says."""

AGG_MODES: dict[Aggregation, str] = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
"""VERL's names of the aggregations that losses ask for."""


PREFIX = "agl:"
"""Beginning of a `loss_mode` by which VERL's workers find a loss of agl-objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChoice:
    """A loss of agl-objectives or of another plugin, and how its tokens are weighted.

    Attributes:
        name: Its name, or `module:name`.
        params: Its parameters.
        aggregation: The weights of its tokens.
        constant: The divisor of the aggregation `constant`.
    """

    name: str
    params: Mapping[str, Any]
    aggregation: Aggregation
    constant: int

    def found(self) -> FoundLoss:
        """Return the loss; raises ConfigError for an unknown name or parameter."""
        return find_loss(self.name, self.params)


def chosen_estimator(settings: VerlSettings) -> FoundEstimator:
    """Return the estimator of a run without a critic; raises ConfigError for an unknown name or parameter."""
    if settings.estimator:
        return find_estimator(settings.estimator, settings.estimator_params)
    algorithm = settings.algorithm
    name = ESTIMATORS[algorithm.adv_estimator]
    return find_estimator("dr_grpo" if name == "grpo" and not algorithm.norm_adv_by_std_in_grpo else name)


def unused_estimator(settings: VerlSettings) -> UnusedEstimator:
    """Return what tells that a run's estimator has nothing to do; a critic refuses such credit itself."""
    return UnusedEstimator("gae" if settings.has_critic else chosen_estimator(settings).entry.name)


def has_greedy(settings: VerlSettings) -> bool:
    """Return whether every task of a step has a greedy rollout, which its groups are compared with."""
    return not settings.has_critic and chosen_estimator(settings).entry.needs_baseline


def compares_batch(settings: VerlSettings) -> bool:
    """Return whether rollouts of different tasks are compared with each other."""
    return not settings.has_critic and chosen_estimator(settings).entry.compares == "batch"


def chosen_loss(settings: VerlSettings) -> LossChoice | None:
    """Return the loss of a run; None where it is VERL's own function, `vanilla` or `gspo`."""
    actor = settings.actor
    if settings.loss:
        name, params = settings.loss, settings.loss_params
    elif actor.policy_loss.loss_mode in _PARAMS:
        name, parameters = _PARAMS[actor.policy_loss.loss_mode]
        params = parameters(actor)
    else:
        return None
    aggregation, constant = _weights(actor)
    return LossChoice(name=name, params=params, aggregation=aggregation, constant=constant)


def needs_entropies(settings: VerlSettings) -> bool:
    """Return whether updates compute entropies: for a bonus, and for losses of others, which may read them."""
    choice = chosen_loss(settings)
    may_read = choice is not None and not is_own_loss(choice.name)
    return settings.actor.entropy_coeff != 0.0 or may_read


def loss_mode(settings: VerlSettings) -> str:
    """Return VERL's name of the loss, or the text by which `losses/loss_worker.py` finds one of agl-objectives."""
    choice = chosen_loss(settings)
    if choice is None:
        return settings.actor.policy_loss.loss_mode
    return PREFIX + json.dumps({"loss": choice.name, "params": dict(choice.params)})


def with_aggregation(settings: VerlSettings, *, is_given: bool) -> VerlSettings:
    """Return the settings with the `loss_agg_mode` that the loss asks for, where the person gave none."""
    actor = settings.actor
    if is_given:
        return settings
    mode = actor.loss_agg_mode
    if settings.loss:
        mode = AGG_MODES[find_loss(settings.loss, settings.loss_params).entry.aggregation]
    elif actor.policy_loss.loss_mode in OVER_SEQUENCES:
        mode = AGG_MODES["sequence"]
    policy = replace(settings.actor_rollout_ref, actor=replace(actor, loss_agg_mode=mode))
    return replace(settings, actor_rollout_ref=policy)


def _weights(actor: ActorKeys) -> tuple[Aggregation, int]:
    """Return our name of VERL's `loss_agg_mode`, and the divisor of `constant`."""
    if actor.loss_agg_mode == "token-mean":
        return "token", 1
    if actor.loss_agg_mode == "seq-mean-token-mean":
        return "sequence", 1
    return "constant", actor.loss_scale_factor or 1  # the sum over a rollout's tokens, divided or not


def _bounds(actor: ActorKeys) -> dict[str, Any]:
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return {
        "clip_low": actor.clip_ratio if low is None else low,
        "clip_high": actor.clip_ratio if high is None else high,
    }


def _dppo(divergence: str) -> Callable[[ActorKeys], dict[str, Any]]:
    return lambda actor: {**_bounds(actor), "divergence": divergence, "ratio_max": actor.clip_ratio_c}


def _clip_cov(actor: ActorKeys) -> dict[str, Any]:
    own = actor.policy_loss
    return {**_bounds(actor), "ratio": own.clip_cov_ratio, "cov_low": own.clip_cov_lb, "cov_high": own.clip_cov_ub}


_PARAMS: dict[str, tuple[str, Callable[[ActorKeys], dict[str, Any]]]] = {
    "cispo": ("cispo", _bounds),
    "sapo": ("sapo", lambda actor: {"tau_positive": actor.tau_pos, "tau_negative": actor.tau_neg}),
    "geo_mean": ("gmpo", _bounds),
    "clip_cov": ("clip-cov", _clip_cov),
    "kl_cov": (
        "kl-cov",
        lambda actor: {"ratio": actor.policy_loss.kl_cov_ratio, "kl_coef": actor.policy_loss.ppo_kl_coef},
    ),
    "dppo_tv": ("dppo", _dppo("tv")),
    "dppo_kl": ("dppo", _dppo("kl")),
    "gpg": ("gpg", lambda _: {}),
    "dro": ("dro", lambda actor: {"beta": actor.policy_loss.dro_beta}),
}
"""Our names of VERL's losses, and their parameters by VERL's keys."""
