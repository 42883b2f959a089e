"""The loss and the estimator of a run, by their names in agl-objectives or by VERL's own keys.

`loss`, `loss_params`, `estimator` and `estimator_params` name any loss and estimator that `grpo` of agl-algo-torch
accepts. VERL's names mean the same functions, with the same numbers as in VERL if a rollout has one row and an update
one micro-batch:

    adv_estimator                          estimator        policy_loss.loss_mode    loss
    grpo, grpo_vectorized                  grpo, dr_grpo    cispo                    cispo
    rloo, rloo_vectorized                  rloo             sapo                     sapo
    reinforce_plus_plus                    reinforce++      geo_mean                 gmpo
    reinforce_plus_plus_baseline           the same         clip_cov, kl_cov         clip-cov, kl-cov
    opo, gpg, grpo_passk                   the same         dppo_tv, dppo_kl         dppo
    remax                                  remax            gpg, dro                 gpg, dro

`vanilla` and `gspo` are VERL's own functions, and `gae` its own estimator.

Deviations from VERL, and why:
- Scores count rollouts, never rows. A group of one has no comparison and gets 0; VERL gives it the score itself
  (`agl_objectives.estimators`).
- REINFORCE++ whitens over the tokens of the batch. Here each score counts once, so a long rollout weighs no more.
- Means over sequences, and the ratios of `geo_mean`, are over rollouts. Tokens of high covariance are chosen among all
  tokens of an update, where VERL compares those of a micro-batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from agl_algo_verl.settings.keys import key_tables
from agl_objectives.registry import find_estimator, find_loss, is_own_loss
from agl_objectives.reports import UnusedEstimator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl_algo_verl.settings.settings import ActorKeys, VerlSettings
    from agl_objectives.aggregation import Aggregation
    from agl_objectives.registry import FoundEstimator, FoundLoss

OVER_SEQUENCES = ("sapo", "geo_mean")
"""VERL's losses that always take a mean over sequences, whatever `loss_agg_mode` says."""

AGG_MODES: dict[Aggregation, str] = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
"""VERL's names for the aggregations of losses."""


PREFIX = "agl:"
"""Prefix of a `loss_mode` by which VERL's workers recognise a loss of agl-objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChoice:
    """A loss of agl-objectives or of another plugin, and the weights of its tokens.

    Attributes:
        name: The loss's name, or `module:name`.
        params: The loss's parameters.
        aggregation: The weights of the tokens.
        constant: The divisor of the aggregation `constant`.
    """

    name: str
    params: Mapping[str, Any]
    aggregation: Aggregation
    constant: int

    def found(self) -> FoundLoss:
        """Look the loss up by name; raises ConfigError for an unknown name or parameter."""
        return find_loss(self.name, self.params)


def chosen_estimator(settings: VerlSettings) -> FoundEstimator:
    """Return the estimator of a run without a critic; raises ConfigError for an unknown name or parameter."""
    # Our name has precedence; a rule in `keys.toml` has checked that VERL's key is not given too.
    if settings.estimator:
        return find_estimator(settings.estimator, settings.estimator_params)
    algorithm = settings.algorithm
    name: str = key_tables()["estimators"][algorithm.adv_estimator]
    # Dr. GRPO is GRPO without the division by the group's deviation (arXiv 2503.20783, section 3.2).
    return find_estimator("dr_grpo" if name == "grpo" and not algorithm.norm_adv_by_std_in_grpo else name)


def unused_estimator(settings: VerlSettings) -> UnusedEstimator:
    """Return a check that warns if the run's estimator has no effect; with a critic, the estimator is `gae`."""
    return UnusedEstimator("gae" if settings.has_critic else chosen_estimator(settings).entry.name)


def has_greedy(settings: VerlSettings) -> bool:
    """Return true if each task of a step gets a greedy rollout, which is the baseline of its group."""
    return not settings.has_critic and chosen_estimator(settings).entry.needs_baseline


def compares_batch(settings: VerlSettings) -> bool:
    """Return true if the estimator compares rollouts of different tasks with each other."""
    return not settings.has_critic and chosen_estimator(settings).entry.compares == "batch"


def chosen_loss(settings: VerlSettings) -> LossChoice | None:
    """Return the loss of a run; None for VERL's own functions, `vanilla` and `gspo`."""
    actor = settings.actor
    if settings.loss:
        name, params = settings.loss, settings.loss_params
    elif named := dict(key_tables()["losses"].get(actor.policy_loss.loss_mode, {})):
        # VERL's keys of the loss become our parameters; a fixed value, such as a divergence, is written with "=".
        name = named.pop("loss")
        params = {ours: key[1:] if key.startswith("=") else actor.number(key) for ours, key in named.items()}
    else:
        return None
    # w_t and W follow from VERL's `loss_agg_mode`, whatever the loss.
    aggregation, constant = _weights(actor)
    return LossChoice(name=name, params=params, aggregation=aggregation, constant=constant)


def needs_entropies(settings: VerlSettings) -> bool:
    """Return true if updates compute entropies: for an entropy bonus, or for a plugin's loss, which may read them."""
    choice = chosen_loss(settings)
    # A plugin's loss may read H_t; none of our own losses does.
    may_read = choice is not None and not is_own_loss(choice.name)
    return settings.actor.entropy_coeff != 0.0 or may_read


def loss_mode(settings: VerlSettings) -> str:
    """Return the `loss_mode` for VERL: its own name of the loss, or a text that names a loss of agl-objectives."""
    choice = chosen_loss(settings)
    if choice is None:
        return settings.actor.policy_loss.loss_mode
    return PREFIX + json.dumps({"loss": choice.name, "params": dict(choice.params)})


def with_aggregation(settings: VerlSettings, *, is_given: bool) -> VerlSettings:
    """Return the settings with the `loss_agg_mode` that the loss requests; unchanged if `is_given`."""
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
    """Return the aggregation that VERL's `loss_agg_mode` names, and the divisor for `constant`."""
    # w_t = 1 and W = the update's tokens, as in DAPO (arXiv 2503.14476, section 3.3).
    if actor.loss_agg_mode == "token-mean":
        return "token", 1
    # w_t = 1 / the rollout's tokens and W = the update's rollouts, as in GRPO's paper.
    if actor.loss_agg_mode == "seq-mean-token-mean":
        return "sequence", 1
    # w_t = 1 / constant and W = the rollouts, as in Dr. GRPO.
    return "constant", actor.loss_scale_factor or 1  # the sum over a rollout's tokens, divided or not
