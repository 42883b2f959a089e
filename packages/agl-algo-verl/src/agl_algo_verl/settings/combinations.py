"""Checks of settings against each other: those that VERL would ignore, or that would count rows, are refused.

Means and statistics count rollouts here and never rows, so that how often an agent calls its model does not change its
weight. Every check raises ConfigError with what was found and what to write instead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError
from agl_algo_verl.losses.choice import check_choices, chosen_loss, compares_batch, has_greedy
from agl_objectives.groups import GroupSampler
from agl_objectives.replay import ReplayPool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl_algo_verl.settings.settings import VerlSettings

IS_THRESHOLD = 2.0
"""VERL's default of `rollout_is_threshold`."""


def check_settings(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that cannot train together; `given` holds the keys that a person wrote, nested."""
    _check_numbers(settings)
    _check_batches(settings)
    _check_loss(settings)
    check_choices(settings, partial(is_given, given))
    _check_critic(settings, given)
    _check_kl(settings, given)
    _check_adapters(settings, given)
    _check_staleness(settings, given)
    _check_overlong(settings, given)
    _check_draws(settings)
    _check_replay(settings)
    _check_correction(settings)
    if settings.anchor_coef < 0:
        raise ConfigError(f"verl got anchor_coef = {settings.anchor_coef}; give 0 for none, or a weight such as 0.1.")


def is_given(given: Mapping[str, Any], name: str) -> bool:
    """Return whether a dotted key, or one below it, was written."""
    level: Any = given
    for part in name.split("."):
        if not isinstance(level, dict) or part not in level:
            return False
        level = cast("dict[str, Any]", level)[part]
    return True


def _check_numbers(settings: VerlSettings) -> None:
    actor, trainer = settings.actor, settings.trainer
    counts = {
        "data.train_batch_size": settings.data.train_batch_size,
        "data.max_prompt_length": settings.data.max_prompt_length,
        "data.max_response_length": settings.data.max_response_length,
        "actor_rollout_ref.rollout.n": settings.actor_rollout_ref.rollout.n,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "critic.ppo_epochs": settings.critic.ppo_epochs,
        "critic.ppo_mini_batch_size": settings.critic.ppo_mini_batch_size,
        "critic.ppo_micro_batch_size_per_gpu": settings.critic.ppo_micro_batch_size_per_gpu,
        "critic.ppo_max_token_len_per_gpu": settings.critic.ppo_max_token_len_per_gpu,
        "trainer.total_epochs": trainer.total_epochs,
        "trainer.total_training_steps": trainer.total_training_steps,
    }
    low = {name: value for name, value in counts.items() if value is not None and value < 1}
    if low:
        raise ConfigError(f"The VERL configuration has {low}; each must be at least 1.")


def _check_batches(settings: VerlSettings) -> None:
    actor, batch = settings.actor, settings.data.train_batch_size
    for name, mini in (
        ("actor_rollout_ref.actor", actor.ppo_mini_batch_size),
        ("critic", settings.critic.ppo_mini_batch_size),
    ):
        if mini is not None and (mini > batch or batch % mini):
            raise ConfigError(  # a last mini-batch with fewer tasks would weigh each of them more
                f"data.train_batch_size = {batch} is not a multiple of {name}.ppo_mini_batch_size = {mini}; "
                "both count tasks. Make one divide the other, or remove ppo_mini_batch_size for one update per step."
            )
    if actor.use_dynamic_bsz is False and not actor.ppo_micro_batch_size_per_gpu:
        raise ConfigError(
            "actor_rollout_ref.actor.use_dynamic_bsz = false needs ppo_micro_batch_size_per_gpu, the rows of a "
            "micro-batch. Give it, or remove use_dynamic_bsz to cut by ppo_max_token_len_per_gpu."
        )
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu:
        raise ConfigError(
            "actor_rollout_ref.actor.use_dynamic_bsz = true cuts micro-batches by tokens, so VERL would ignore "
            "ppo_micro_batch_size_per_gpu. Remove one of them."
        )


def _check_loss(settings: VerlSettings) -> None:
    actor = settings.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"VERL ignores loss_scale_factor with loss_agg_mode = {actor.loss_agg_mode!r}. Remove it, or use "
            "seq-mean-token-sum-norm."
        )
    # Gradients of micro-batches add up, so each must be divided by the same number.
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise ConfigError(
            "loss_agg_mode = 'seq-mean-token-sum-norm' without loss_scale_factor divides by the longest row of a "
            "micro-batch, which differs between micro-batches. Give loss_scale_factor, such as the response length."
        )
    # VERL's own losses get advantages scaled from a mean over rows to one over rollouts; the entropy has none to scale.
    is_over_rows = chosen_loss(settings) is None and actor.loss_agg_mode == "seq-mean-token-mean"
    if actor.entropy_coeff and is_over_rows:
        raise ConfigError(
            "entropy_coeff with loss_agg_mode = 'seq-mean-token-mean' would count an agent's rows, not its rollouts. "
            'Use token-mean, or loss = "ppo-clip", or set entropy_coeff = 0.'
        )


def _check_critic(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    algorithm = settings.algorithm
    if not settings.has_critic:
        unused = ["critic"] if is_given(given, "critic") else []
        unused += ["trainer.critic_warmup"] if settings.trainer.critic_warmup else []
        unused += [f"algorithm.{name}" for name in ("gamma", "lam") if getattr(algorithm, name) != 1.0]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} would be ignored: {_estimator(settings)} has no "
                'critic. Use "gae", or remove them. Without a critic it is credit that discounts: credit = "turn" with '
                "gamma."
            )
        return
    if not (0.0 <= algorithm.gamma <= 1.0 and 0.0 <= algorithm.lam <= 1.0) or settings.critic.cliprange_value <= 0:
        raise ConfigError(
            f"The VERL configuration has algorithm.gamma = {algorithm.gamma}, algorithm.lam = {algorithm.lam} and "
            f"critic.cliprange_value = {settings.critic.cliprange_value}; the first two are between 0 and 1, the last "
            "is above 0."
        )


def _estimator(settings: VerlSettings) -> str:
    """Return the setting that names the estimator."""
    if settings.estimator:
        return f"estimator = {settings.estimator!r}"
    return f"algorithm.adv_estimator = {settings.algorithm.adv_estimator!r}"


def _check_kl(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    actor, algorithm = settings.actor, settings.algorithm
    own = "actor_rollout_ref.actor"
    # The KL term has no advantage to scale either.
    if actor.use_kl_loss and actor.loss_agg_mode == "seq-mean-token-mean" and chosen_loss(settings) is None:
        raise ConfigError(
            "use_kl_loss with loss_agg_mode = 'seq-mean-token-mean' would count an agent's rows, not its rollouts. "
            'Use token-mean, or loss = "ppo-clip", or algorithm.use_kl_in_reward = true.'
        )
    unused: list[str] = []
    if not actor.use_kl_loss:
        unused += [f"{own}.kl_loss_coef"] if is_given(given, f"{own}.kl_loss_coef") and actor.kl_loss_coef else []
        unused += [f"{own}.kl_loss_type"] if is_given(given, f"{own}.kl_loss_type") else []
    if not algorithm.use_kl_in_reward:
        is_weighted = is_given(given, "algorithm.kl_ctrl") and algorithm.kl_ctrl.kl_coef
        unused += ["algorithm.kl_ctrl"] if is_weighted else []
        unused += ["algorithm.kl_penalty"] if is_given(given, "algorithm.kl_penalty") else []
    moved = [f"algorithm.kl_ctrl.{name}" for name in ("horizon", "target_kl")]
    fixed = [name for name in moved if algorithm.kl_ctrl.type == "fixed" and is_given(given, name)]
    if fixed and not unused:
        raise ConfigError(
            f'VERL would ignore {", ".join(fixed)} with algorithm.kl_ctrl.type = "fixed", whose weight stays '
            'kl_coef. Remove them, or set algorithm.kl_ctrl.type = "adaptive".'
        )
    if unused:
        raise ConfigError(
            f"VERL would ignore {', '.join(unused)}, because no KL penalty is switched on. Remove them, or set "
            "actor_rollout_ref.actor.use_kl_loss = true or algorithm.use_kl_in_reward = true."
        )


def _check_adapters(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    model = settings.actor_rollout_ref.model
    if model.lora_rank < 0:
        raise ConfigError(f"actor_rollout_ref.model.lora_rank is {model.lora_rank}; give 0 for none, or a rank.")
    names = [f"actor_rollout_ref.model.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")]
    unused = [name for name in names if is_given(given, name)]
    if unused and not model.lora_rank:
        raise ConfigError(
            f"VERL would ignore {', '.join(unused)} without actor_rollout_ref.model.lora_rank. Give a rank such as 16, "
            "or remove them."
        )


def _check_staleness(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    v1 = settings.trainer.v1
    if not v1.is_async:
        names = [f"trainer.v1.{name}" for name in ("colocate_async", "sampler")]
        unused = [name for name in names if is_given(given, name)]
        if unused:
            raise ConfigError(
                f'VERL would ignore {", ".join(unused)} with trainer.v1.trainer_mode = "sync", where every group is '
                'new. Remove them, or set trainer_mode = "colocate_async".'
            )
        return
    ahead, threshold = v1.colocate_async.num_warmup_batches, v1.sampler.max_off_policy_threshold
    # A group asked for in step s for step s + ahead spans ahead + 1 versions; none may be too old on arrival.
    if not 1 <= ahead < threshold:
        raise ConfigError(
            f"trainer.v1.colocate_async.num_warmup_batches = {ahead} and sampler.max_off_policy_threshold = "
            f"{threshold}: a group that is asked for N steps ahead spans N + 1 versions. Give at least 1 batch, and a "
            "threshold above it."
        )


def _check_overlong(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    name, long = "reward.reward_kwargs", settings.reward.reward_kwargs
    buffer = long.overlong_buffer_cfg
    if is_given(given, name) and not is_given(given, f"{name}.overlong_buffer_cfg.enable"):
        raise ConfigError(
            f"{name} is ignored without overlong_buffer_cfg.enable. Set it to true to punish long answers, or remove "
            f"{name}."
        )
    if buffer.enable and not (0 < buffer.len <= (long.max_resp_len or 0) and buffer.penalty_factor > 0):
        raise ConfigError(
            f"{name} has overlong_buffer_cfg.len = {buffer.len}, penalty_factor = {buffer.penalty_factor} and "
            f"max_resp_len = {long.max_resp_len}. Give the most tokens of an answer, the part of them, at least 1, in "
            "which it is punished, and a factor above 0."
        )
    if buffer.log:
        raise ConfigError(
            f"{name}.overlong_buffer_cfg.log = true: the punishment is part of each call's credit and is not logged "
            "per rollout. Remove it."
        )


def _check_draws(settings: VerlSettings) -> None:
    """Raise ConfigError for rounds and a curriculum that are wrong, or do not go with groups asked for ahead."""
    GroupSampler(
        "verl",
        count=settings.data.train_batch_size,
        n=settings.actor_rollout_ref.rollout.n,
        refill=settings.refill,
        curriculum=settings.curriculum,
        uniform=settings.curriculum_uniform,
        has_greedy=has_greedy(settings),
        compares_batch=compares_batch(settings),
    )
    asked = [name for name in ("refill", "curriculum") if getattr(settings, name)]
    if asked and settings.trainer.v1.is_async:
        raise ConfigError(
            f"verl got {' and '.join(asked)} with trainer.v1.trainer_mode = {settings.trainer.v1.trainer_mode!r}, "
            "which asks for the groups of later steps before the rewards of this one are known. Use "
            'trainer_mode = "sync", or remove what is named first.'
        )


def _check_replay(settings: VerlSettings) -> None:
    """Raise ConfigError for a replay that is out of range, or whose tokens nothing would weigh."""
    ReplayPool[Any]("verl", share=settings.replay, max_staleness=settings.replay_max_staleness)
    if settings.replay and settings.algorithm.rollout_correction.rollout_is is None:
        raise ConfigError(
            f"verl got replay = {settings.replay}, and nothing weighs tokens that older weights drew. Set "
            'algorithm.rollout_correction.rollout_is = "token"; rollout_is_threshold is the largest weight.'
        )


def _check_correction(settings: VerlSettings) -> None:
    """Raise ConfigError for a correction with values that mean nothing, or that has no effect."""
    correction, keys, home = settings.correction, settings.algorithm.rollout_correction, "algorithm.rollout_correction"
    unused = ["rollout_is_batch_normalize"] if keys.rollout_is_batch_normalize else []
    unused += ["rollout_is_threshold"] if keys.rollout_is_threshold != IS_THRESHOLD else []
    if unused and keys.rollout_is is None:
        raise ConfigError(f"{home}.{unused[0]} is ignored without rollout_is. Give that, or remove it.")
    if keys.bypass_mode and correction.is_on:
        raise ConfigError(
            f"{home}.bypass_mode = true takes the recorded log-probabilities for the old ones, so that rollout_is and "
            "rollout_rs have nothing to correct. Remove one or the other."
        )
    if correction.bounds and settings.has_critic:
        raise ConfigError(
            f"{home}.rollout_rs would leave tokens out of the sums of the critic's advantages. Use rollout_is with "
            '"LOW_HIGH" as rollout_is_threshold, or an estimator without a critic.'
        )
