"""VERL's configuration keys, as far as training in one process uses them, typed and checked before anything runs.

The structs have VERL's own nesting and names, and VERL's defaults except where `Differs` is said. A key that is not
here is looked up in the configuration that VERL ships (`keys.py`), so that a message can tell a spelling mistake from
a key of VERL that this engine would ignore, and from one that the experiment decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from agl.errors import ConfigError
from agl_algo_verl.keys import check_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of VERL's configuration."""


class RolloutCorrection(Keys, frozen=True, kw_only=True):
    """Truncated importance sampling of the trainer's over the sampler's probabilities; off by default, as in VERL."""

    rollout_is: Literal["token"] | None = None
    rollout_is_threshold: float = 2.0


class Algorithm(Keys, frozen=True, kw_only=True):
    """Differs: `adv_estimator` is `grpo`; VERL's `gae` needs a critic."""

    adv_estimator: Estimator = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    rollout_correction: RolloutCorrection = RolloutCorrection()


class Data(Keys, frozen=True, kw_only=True):
    """Lengths in tokens; rows beyond them are left out and counted."""

    train_batch_size: int = 1024
    max_prompt_length: int = 512
    max_response_length: int = 512


class Optim(Keys, frozen=True, kw_only=True):
    """AdamW; warm-up and decay count steps of the experiment."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5


class MixedPrecision(Keys, frozen=True, kw_only=True):
    """Differs: `fp32` on the CPU, where bfloat16 is slow; VERL's `bf16` on a GPU. `None` for that choice."""

    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    buffer_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


class FsdpConfig(Keys, frozen=True, kw_only=True):
    """What VERL's FSDP2 engine is told."""

    model_dtype: Literal["fp32", "bf16"] = "fp32"
    mixed_precision: MixedPrecision = MixedPrecision()
    param_offload: bool = False
    optimizer_offload: bool = False


class PolicyLoss(Keys, frozen=True, kw_only=True):
    """Which of VERL's policy losses."""

    loss_mode: Literal["vanilla", "gspo"] = "vanilla"


class Actor(Keys, frozen=True, kw_only=True):
    """Differs: `ppo_mini_batch_size` is the whole step and micro-batches are made by tokens where none is given."""

    ppo_mini_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: int = 16384
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: AggMode = "token-mean"
    loss_scale_factor: int | None = None
    entropy_coeff: float = 0.0
    policy_loss: PolicyLoss = PolicyLoss()
    optim: Optim = Optim()
    fsdp_config: FsdpConfig = FsdpConfig()


class Model(Keys, frozen=True, kw_only=True):
    """Differs: both are off by default; `use_remove_padding` needs flash-attn, which the CPU has not."""

    use_remove_padding: bool = False
    enable_gradient_checkpointing: bool = False


class Rollout(Keys, frozen=True, kw_only=True):
    """Differs: `n` is 8; with VERL's 1 nothing could be compared."""

    n: int = 8


class ActorRolloutRef(Keys, frozen=True, kw_only=True):
    """The policy."""

    actor: Actor = Actor()
    model: Model = Model()
    rollout: Rollout = Rollout()


class Trainer(Keys, frozen=True, kw_only=True):
    """`total_training_steps`, where given, wins over `total_epochs`."""

    total_epochs: int = 30
    total_training_steps: int | None = None


class Settings(Keys, frozen=True, kw_only=True):
    """Everything that training in one process uses of VERL's configuration."""

    algorithm: Algorithm = Algorithm()
    data: Data = Data()
    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    trainer: Trainer = Trainer()

    @property
    def actor(self) -> Actor:
        """The actor's part."""
        return self.actor_rollout_ref.actor

    @property
    def is_dynamic(self) -> bool:
        """Whether micro-batches are cut by tokens rather than by rows."""
        return self.actor.use_dynamic_bsz or not self.actor.ppo_micro_batch_size_per_gpu

    def steps(self, tasks: int) -> int:
        """Steps in all for a number of training tasks; the last, partial batch of an epoch is carried on."""
        given = self.trainer.total_training_steps
        return given or max(1, self.trainer.total_epochs * tasks // min(self.data.train_batch_size, tasks))


def read_settings(config: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Return the settings of VERL's nested keys, and what to tell the person about keys that others decide.

    Raises ConfigError for keys that are unknown or would be ignored, and for combinations that cannot train.
    """
    used, notes = check_keys(config, Settings)
    try:
        settings = msgspec.convert(used, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The VERL configuration has a wrong value: {error}. See docs/how-to/verl.md.") from error
    _check_numbers(settings)
    _check_combinations(settings)
    return settings, notes


def _check_numbers(settings: Settings) -> None:
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
        "trainer.total_epochs": trainer.total_epochs,
        "trainer.total_training_steps": trainer.total_training_steps,
    }
    low = {name: value for name, value in counts.items() if value is not None and value < 1}
    if low:
        raise ConfigError(f"The VERL configuration has {low}; each must be at least 1.")


def _check_combinations(settings: Settings) -> None:
    actor, algorithm, batch = settings.actor, settings.algorithm, settings.data.train_batch_size
    mini, rollouts = actor.ppo_mini_batch_size, settings.actor_rollout_ref.rollout.n
    if rollouts == 1 and algorithm.adv_estimator != "reinforce_plus_plus":
        raise ConfigError(
            f"algorithm.adv_estimator = {algorithm.adv_estimator!r} compares the rollouts of a task, but "
            "actor_rollout_ref.rollout.n is 1. Give at least 2, or use reinforce_plus_plus, which compares over the "
            "batch."
        )
    if mini is not None and (mini > batch or batch % mini):
        raise ConfigError(
            f"data.train_batch_size = {batch} is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size = {mini}; "
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
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"VERL ignores loss_scale_factor with loss_agg_mode = {actor.loss_agg_mode!r}. Remove it, or use "
            "seq-mean-token-sum-norm."
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise ConfigError(
            "loss_agg_mode = 'seq-mean-token-sum-norm' without loss_scale_factor divides by the longest row of a "
            "micro-batch, which differs between micro-batches. Give loss_scale_factor, such as the response length."
        )
    if actor.entropy_coeff and actor.loss_agg_mode == "seq-mean-token-mean":
        raise ConfigError(
            "entropy_coeff with loss_agg_mode = 'seq-mean-token-mean' would count an agent's rows, not its rollouts. "
            "Use token-mean, or set entropy_coeff = 0."
        )
    if algorithm.adv_estimator != "grpo" and not algorithm.norm_adv_by_std_in_grpo:
        raise ConfigError(
            f"norm_adv_by_std_in_grpo is ignored with adv_estimator = {algorithm.adv_estimator!r}. Remove it, or use "
            "grpo."
        )
