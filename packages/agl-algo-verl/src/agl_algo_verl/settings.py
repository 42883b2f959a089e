"""VERL's configuration keys, as far as training in one process uses them, typed and checked before anything runs.

The structs have VERL's own nesting and names, and VERL's defaults except where `Differs` is said. A key that is not
here is looked up in the configuration that VERL ships (`keys.py`), so that a message can tell a spelling mistake from
a key of VERL that this engine would ignore, and from one that the experiment decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from agl.errors import ConfigError
from agl_algo_verl.combinations import check_settings
from agl_algo_verl.keys import check_keys
from agl_algo_verl.refused_values import check_values

if TYPE_CHECKING:
    from collections.abc import Mapping

Estimator = Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
Loss = Literal["vanilla", "gspo"]
KlEstimate = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KlLoss = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of VERL's configuration."""


class RolloutCorrectionKeys(Keys, frozen=True, kw_only=True):
    """Truncated importance sampling of the trainer's over the sampler's probabilities; off by default, as in VERL."""

    rollout_is: Literal["token"] | None = None
    rollout_is_threshold: float = 2.0


class KlControlKeys(Keys, frozen=True, kw_only=True):
    """The weight of the KL penalty in the reward; `adaptive` moves it towards `target_kl` nats per token."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


class AlgorithmKeys(Keys, frozen=True, kw_only=True):
    """Differs: `adv_estimator` is `grpo`, which needs no critic."""

    adv_estimator: Estimator = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    use_kl_in_reward: bool = False
    kl_penalty: KlEstimate = "kl"
    kl_ctrl: KlControlKeys = KlControlKeys()
    rollout_correction: RolloutCorrectionKeys = RolloutCorrectionKeys()


class DataKeys(Keys, frozen=True, kw_only=True):
    """Lengths in tokens. Differs: `filter_overlong_prompts` is on; rows beyond a length are left out and counted.

    Off, a prompt that is too long stops the run, as VERL's `truncation = "error"` does.
    """

    train_batch_size: int = 1024
    max_prompt_length: int = 512
    max_response_length: int = 512
    filter_overlong_prompts: bool = True


class OptimKeys(Keys, frozen=True, kw_only=True):
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


class CriticOptimKeys(OptimKeys, frozen=True, kw_only=True):
    """AdamW of the critic."""

    lr: float = 1e-5


class MixedPrecisionKeys(Keys, frozen=True, kw_only=True):
    """Differs: `fp32` on the CPU, where bfloat16 is slow; VERL's `bf16` on a GPU. `None` for that choice."""

    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    buffer_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


class FsdpKeys(Keys, frozen=True, kw_only=True):
    """What VERL's FSDP2 engine is told."""

    model_dtype: Literal["fp32", "bf16"] = "fp32"
    mixed_precision: MixedPrecisionKeys = MixedPrecisionKeys()
    param_offload: bool = False
    optimizer_offload: bool = False


class PolicyLossKeys(Keys, frozen=True, kw_only=True):
    """Which of VERL's policy losses."""

    loss_mode: Loss = "vanilla"


class ActorKeys(Keys, frozen=True, kw_only=True):
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
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: KlLoss = "low_var_kl"
    policy_loss: PolicyLossKeys = PolicyLossKeys()
    optim: OptimKeys = OptimKeys()
    fsdp_config: FsdpKeys = FsdpKeys()


class ModelKeys(Keys, frozen=True, kw_only=True):
    """Differs: the switches are off by default; `use_remove_padding` needs flash-attn, which the CPU has not."""

    use_remove_padding: bool = False
    enable_gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | None = None


class RolloutKeys(Keys, frozen=True, kw_only=True):
    """Differs: `n` is 8; with VERL's 1 nothing could be compared."""

    n: int = 8


class ActorRolloutRefKeys(Keys, frozen=True, kw_only=True):
    """The policy."""

    actor: ActorKeys = ActorKeys()
    model: ModelKeys = ModelKeys()
    rollout: RolloutKeys = RolloutKeys()


class CriticModelKeys(Keys, frozen=True, kw_only=True):
    """Differs: off by default."""

    enable_gradient_checkpointing: bool = False


class CriticKeys(Keys, frozen=True, kw_only=True):
    """The value model of `adv_estimator = "gae"`; where `None`, mini-batches and epochs are the actor's."""

    optim: CriticOptimKeys = CriticOptimKeys()
    model: CriticModelKeys = CriticModelKeys()
    fsdp: FsdpKeys = FsdpKeys()
    ppo_mini_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    ppo_max_token_len_per_gpu: int = 32768
    ppo_epochs: int | None = None
    cliprange_value: float = 0.5
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum"] = "token-mean"


class ColocateAsyncKeys(Keys, frozen=True, kw_only=True):
    """Batches of groups that are asked for ahead of the step that trains them."""

    num_warmup_batches: int = 1


class SamplerKeys(Keys, frozen=True, kw_only=True):
    """How many versions of the policy a group may span, and what becomes of one that would span more."""

    max_off_policy_threshold: int = 8
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"


class V1Keys(Keys, frozen=True, kw_only=True):
    """Whether rollouts go on while the models learn."""

    trainer_mode: Literal["sync", "colocate_async"] = "sync"
    colocate_async: ColocateAsyncKeys = ColocateAsyncKeys()
    sampler: SamplerKeys = SamplerKeys()

    @property
    def is_async(self) -> bool:
        """Whether they do."""
        return self.trainer_mode != "sync"


class TrainerKeys(Keys, frozen=True, kw_only=True):
    """`total_training_steps` wins over `total_epochs`; before step `critic_warmup` the critic alone learns."""

    critic_warmup: int = 0
    v1: V1Keys = V1Keys()

    total_epochs: int = 30
    total_training_steps: int | None = None


class VerlSettings(Keys, frozen=True, kw_only=True):
    """Everything that training in one process uses of VERL's configuration."""

    algorithm: AlgorithmKeys = AlgorithmKeys()
    data: DataKeys = DataKeys()
    actor_rollout_ref: ActorRolloutRefKeys = ActorRolloutRefKeys()
    critic: CriticKeys = CriticKeys()
    trainer: TrainerKeys = TrainerKeys()

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic's values."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def actor(self) -> ActorKeys:
        """The actor's part."""
        return self.actor_rollout_ref.actor

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the policy at the start is needed."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.actor_rollout_ref.model.lora_rank > 0

    @property
    def is_dynamic(self) -> bool:
        """Whether micro-batches are cut by tokens rather than by rows."""
        return self.actor.use_dynamic_bsz or not self.actor.ppo_micro_batch_size_per_gpu

    def steps(self, tasks: int) -> int:
        """Steps in all for a number of training tasks; the last, partial batch of an epoch is carried on."""
        given = self.trainer.total_training_steps
        return given or max(1, self.trainer.total_epochs * tasks // min(self.data.train_batch_size, tasks))


def read_settings(config: Mapping[str, Any]) -> tuple[VerlSettings, list[str]]:
    """Return the settings of VERL's nested keys, and what to tell the person about keys that others decide.

    Raises ConfigError for keys that are unknown or would be ignored, and for combinations that cannot train.
    """
    used, notes = check_keys(config, VerlSettings)
    check_values(used)
    try:
        settings = msgspec.convert(used, VerlSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The VERL configuration has a wrong value: {error}. See docs/how-to/verl.md.") from error
    check_settings(settings, used)
    return settings, notes
