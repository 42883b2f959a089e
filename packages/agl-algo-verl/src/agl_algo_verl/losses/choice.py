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

from agl.errors import ConfigError
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

BOUNDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
LOSS_KEYS: dict[str, tuple[str, ...]] = {
    "vanilla": (*BOUNDS, "clip_ratio_c"),
    "gspo": BOUNDS,
    "cispo": BOUNDS,
    "sapo": ("tau_pos", "tau_neg"),
    "geo_mean": BOUNDS,
    "clip_cov": (*BOUNDS, *(f"policy_loss.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"))),
    "kl_cov": ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
    "dppo_tv": (*BOUNDS, "clip_ratio_c"),
    "dppo_kl": (*BOUNDS, "clip_ratio_c"),
    "gpg": (),
    "dro": ("policy_loss.dro_beta",),
}
"""The keys of `actor_rollout_ref.actor` that each of VERL's losses reads."""

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


def check_choices(settings: VerlSettings, is_given: Callable[[str], bool]) -> None:
    """Raise ConfigError for a loss or an estimator that is named twice, or with keys that it does not read."""
    _check_loss(settings, is_given)
    _check_estimator(settings, is_given)


def _check_loss(settings: VerlSettings, is_given: Callable[[str], bool]) -> None:
    actor, home = settings.actor, "actor_rollout_ref.actor"
    mode = actor.policy_loss.loss_mode
    if settings.loss_params and not settings.loss:
        raise ConfigError(
            f'loss_params = {settings.loss_params} without loss. Name the loss, such as loss = "cispo", or write '
            f"VERL's own keys below {home}."
        )
    known = dict.fromkeys(name for names in LOSS_KEYS.values() for name in names)
    read = () if settings.loss else LOSS_KEYS[mode]
    unread = [f"{home}.{name}" for name in known if name not in read and is_given(f"{home}.{name}")]
    if settings.loss and is_given(f"{home}.policy_loss.loss_mode"):
        unread.insert(0, f"{home}.policy_loss.loss_mode")
    if unread:
        reader = f"loss = {settings.loss!r} takes loss_params and" if settings.loss else f"loss_mode = {mode!r}"
        raise ConfigError(f"{reader} does not read {', '.join(unread)}. Remove what is not meant.")
    if not settings.loss and mode in OVER_SEQUENCES and actor.loss_agg_mode != AGG_MODES["sequence"]:
        raise ConfigError(
            f"loss_mode = {mode!r} is a mean over sequences, so that loss_agg_mode = {actor.loss_agg_mode!r} would be "
            f"ignored. Remove it, or use loss = {_PARAMS[mode][0]!r}, which takes every loss_agg_mode."
        )
    if not settings.loss and mode == "dro" and not actor.policy_loss.dro_beta:
        raise ConfigError(f"loss_mode = 'dro' needs {home}.policy_loss.dro_beta, a number above 0 such as 0.1.")
    choice = chosen_loss(settings)
    if choice is not None and choice.found().entry.needs_updates:
        _check_updates(settings, f"loss = {settings.loss!r}" if settings.loss else f"loss_mode = {mode!r}")


def _check_updates(settings: VerlSettings, shown: str) -> None:
    """Raise ConfigError where a step has one update, in which the policy is the old one."""
    actor, tasks = settings.actor, settings.data.train_batch_size
    updates = actor.ppo_epochs * (tasks // (actor.ppo_mini_batch_size or tasks))
    # In bypass mode the old policy is the one that drew the tokens, as the server computed it.
    if updates == 1 and not settings.algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            f"{shown} has a penalty without a gradient in the first update of a step, and a step has one update. Give "
            "actor_rollout_ref.actor.ppo_epochs above 1 or a smaller ppo_mini_batch_size, or another loss."
        )


def _check_estimator(settings: VerlSettings, is_given: Callable[[str], bool]) -> None:
    algorithm, rollouts = settings.algorithm, settings.actor_rollout_ref.rollout.n
    if settings.estimator_params and not settings.estimator:
        raise ConfigError(
            f"estimator_params = {settings.estimator_params} without estimator. Name the estimator, such as "
            'estimator = "grpo".'
        )
    names = ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
    twice = [name for name in names if settings.estimator and is_given(name)]
    if twice:
        raise ConfigError(f"estimator = {settings.estimator!r} and {' and '.join(twice)} are given. Keep one of them.")
    if algorithm.adv_estimator not in ("grpo", "grpo_vectorized") and not algorithm.norm_adv_by_std_in_grpo:
        raise ConfigError(
            f"norm_adv_by_std_in_grpo is ignored with adv_estimator = {algorithm.adv_estimator!r}. Remove it, or use "
            "grpo."
        )
    if settings.has_critic:
        return
    found = chosen_estimator(settings)
    shown = f"estimator = {settings.estimator!r}" if settings.estimator else f"{names[0]} = {algorithm.adv_estimator!r}"
    if found.entry.needs_baseline:
        _check_greedy(settings, shown)
    # With one rollout the baseline is its own score, and every advantage is 0.
    elif rollouts == 1 and found.entry.compares == "group":
        raise ConfigError(
            f"{shown} compares the rollouts of a task, but actor_rollout_ref.rollout.n is 1. Give at least 2, or use "
            "reinforce_plus_plus, which compares over the batch, or gae, which compares with its critic."
        )
    if algorithm.use_kl_in_reward and found.entry.compares == "batch":
        raise ConfigError(
            f"use_kl_in_reward with {shown} would need a return per token, and here that estimator compares whole "
            "rollouts. Use actor_rollout_ref.actor.use_kl_loss = true, or reinforce_plus_plus_baseline."
        )


def _check_greedy(settings: VerlSettings, shown: str) -> None:
    """Raise ConfigError for an estimator that compares with a greedy rollout, where there is none to compare with."""
    if settings.trainer.v1.is_async:
        raise ConfigError(
            f"{shown} compares with a greedy rollout of each task by the weights of the step, and "
            f"trainer.v1.trainer_mode = {settings.trainer.v1.trainer_mode!r} asks for groups ahead. Use "
            'trainer_mode = "sync", or rloo.'
        )
    if settings.algorithm.use_kl_in_reward:
        raise ConfigError(
            f"use_kl_in_reward with {shown} would take a penalty off the sampled rollouts, and not off the greedy ones "
            "that they are compared with. Use actor_rollout_ref.actor.use_kl_loss = true, or rloo."
        )


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
