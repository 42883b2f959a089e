"""VERL's configuration keys that training in one process uses, typed and checked before anything runs.

The structs have VERL's own nesting and names, and VERL's defaults except where a docstring says `Differs`. A key that
is not here is looked up in the configuration that VERL ships (`keys.py`), so that a message can distinguish a
misspelled key, a key of VERL that this engine would ignore, and a key that the experiment decides.

For the symbols in comments see `models.py` (losses), `shaping.py` (KL penalty, GAE) and `critic.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from agl.errors import ConfigError
from agl_algo_verl.algorithm import Replay, Sampling
from agl_algo_verl.losses.choice import with_aggregation
from agl_algo_verl.losses.correction import correction_of
from agl_algo_verl.settings.checks import check_settings
from agl_algo_verl.settings.keys import leaves, nested, read_keys
from agl_objectives.reports import MAX_NONFINITE
from agl_objectives.settings import Count, NotNegative, Positive, Saving, Settings, Share, Whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl_algo_verl.losses.correction import Correction

Estimator = Literal[
    "gae",
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "grpo_passk",
    "remax",
]
Loss = Literal["vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "gpg", "dro"]
KlEstimate = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KlLoss = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class RolloutCorrectionKeys(Settings, frozen=True, kw_only=True):
    """Correction of the loss for tokens that another policy sampled (`correction.py`). Off by default, as in VERL."""

    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: float | str = 2.0  # a ratio above it counts as this; "LOW_HIGH" drops those outside
    rollout_is_batch_normalize: bool = False  # weights over their mean, which keeps the gradient's size
    rollout_rs: str | None = None  # statistics by which tokens are rejected
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False  # the recorded log-probabilities are the old ones, and no pass computes them
    loss_type: Literal["ppo_clip"] = "ppo_clip"  # of VERL's bypass_mode


class KlControlKeys(Settings, frozen=True, kw_only=True):
    """The weight of the KL penalty in the reward; `adaptive` changes it until the KL is `target_kl` (`learner.py`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001  # beta, and where an adaptive one starts
    horizon: int = 10000  # rollouts; smaller is faster
    target_kl: float = 0.1  # nats per token


class AlgorithmKeys(Settings, frozen=True, kw_only=True):
    """Advantages, and the keys that change them. Differs: `adv_estimator` is `grpo`, which needs no critic."""

    adv_estimator: Estimator = "grpo"
    norm_adv_by_std_in_grpo: bool = True  # False is Dr. GRPO
    gamma: Share = 1.0  # discount per trained token; with `gae` only
    lam: Share = 1.0  # lambda of GAE: 1 trusts returns, 0 the critic
    use_kl_in_reward: bool = False
    kl_penalty: KlEstimate = "kl"  # estimate of KL_t; `kl` is k1, log pi_old - log pi_ref
    kl_ctrl: KlControlKeys = KlControlKeys()
    rollout_correction: RolloutCorrectionKeys = RolloutCorrectionKeys()


class DataKeys(Settings, frozen=True, kw_only=True):
    """Lengths in tokens. Differs: `filter_overlong_prompts` is on; rows beyond a length are left out and counted.

    If it is off, a prompt that is too long stops the run, as with VERL's `truncation = "error"`.
    """

    train_batch_size: Count = 1024
    max_prompt_length: Count = 512
    max_response_length: Count = 512
    filter_overlong_prompts: bool = True


class OptimKeys(Settings, frozen=True, kw_only=True):
    """The policy's AdamW; warm-up and decay count steps of the experiment."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad: float = 1.0  # largest norm of the gradient
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: int = -1  # -1 leaves it to the ratio
    lr_warmup_steps_ratio: float = 0.0  # share of the run's steps
    min_lr_ratio: float = 0.0  # of lr, where a cosine ends
    num_cycles: float = 0.5  # 0.5 falls once from lr to the end


class CriticOptimKeys(OptimKeys, frozen=True, kw_only=True):
    """The critic's AdamW."""

    lr: float = 1e-5


class MixedPrecisionKeys(Settings, frozen=True, kw_only=True):
    """Precisions of the engine. Differs: by default `param_dtype` is `fp32` on the CPU, where VERL's `bf16` is slow."""

    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    buffer_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


class FsdpKeys(Settings, frozen=True, kw_only=True):
    """VERL's FSDP2 engine: its precision, and the parts that it offloads to the CPU's memory."""

    model_dtype: Literal["fp32", "bf16"] = "fp32"
    mixed_precision: MixedPrecisionKeys = MixedPrecisionKeys()
    param_offload: bool = False
    optimizer_offload: bool = False


class PolicyLossKeys(Settings, frozen=True, kw_only=True):
    """The choice among VERL's policy losses."""

    loss_mode: Loss = "vanilla"
    clip_cov_ratio: float = 0.0002  # share of the tokens that clip_cov holds back
    clip_cov_lb: float = 1.0  # the covariances between which it takes them
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002  # share of the tokens that kl_cov penalises
    ppo_kl_coef: float = 0.1  # the weight of that penalty
    dro_beta: float | None = None  # weight of dro's quadratic bound


class ActorKeys(Settings, frozen=True, kw_only=True):
    """Updates and loss of the policy.

    Differs: by default a mini-batch is the whole step, and micro-batches are cut by tokens.
    """

    ppo_mini_batch_size: Count | None = None  # tasks of one optimizer update
    ppo_micro_batch_size_per_gpu: Count | None = None  # rows of one forward and backward pass; memory only
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: Count = 16384  # tokens of one pass, where no rows are given
    ppo_epochs: Count = 1  # updates of each mini-batch
    clip_ratio: float = 0.2  # eps_low and eps_high, where they are not given
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0  # c of the vanilla loss, and the largest ratio of dppo
    tau_pos: float = 1.0  # steepness of sapo's gate where A > 0
    tau_neg: float = 1.05  # and elsewhere
    loss_agg_mode: AggMode = "token-mean"
    loss_scale_factor: int | None = None  # of seq-mean-token-sum-norm
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: KlLoss = "low_var_kl"  # k3, which is never negative
    policy_loss: PolicyLossKeys = PolicyLossKeys()
    optim: OptimKeys = OptimKeys()
    fsdp_config: FsdpKeys = FsdpKeys()

    def number(self, name: str) -> Any:
        """Return the value of the key with a dotted name; a ratio bound that is not set equals `clip_ratio`."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return self.clip_ratio if value is None and name.startswith("clip_ratio_") else value


class ModelKeys(Settings, frozen=True, kw_only=True):
    """The network and its adapters. Differs: by default `use_remove_padding` is on if possible (`packing.py`)."""

    use_remove_padding: bool | None = None  # rows packed one behind the other
    enable_gradient_checkpointing: bool = False  # less memory for a second forward pass
    lora_rank: Whole = 0  # r; 0 trains all weights
    lora_alpha: int = 16  # adapters are scaled by alpha / r
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | None = None


class RolloutKeys(Settings, frozen=True, kw_only=True):
    """Collecting rollouts. Differs: `n` is 8, because with VERL's 1 there would be nothing to compare."""

    n: Count = 8  # rollouts of a task, which are a group


class ActorRolloutRefKeys(Settings, frozen=True, kw_only=True):
    """Everything about the policy: its training, its network, its rollouts."""

    actor: ActorKeys = ActorKeys()
    model: ModelKeys = ModelKeys()
    rollout: RolloutKeys = RolloutKeys()


class CriticModelKeys(Settings, frozen=True, kw_only=True):
    """The critic's network. Differs: gradient checkpointing is off by default."""

    enable_gradient_checkpointing: bool = False


class CriticKeys(Settings, frozen=True, kw_only=True):
    """The value model of `adv_estimator = "gae"`; by default its mini-batches and epochs are the actor's."""

    optim: CriticOptimKeys = CriticOptimKeys()
    model: CriticModelKeys = CriticModelKeys()
    fsdp: FsdpKeys = FsdpKeys()
    ppo_mini_batch_size: Count | None = None
    ppo_micro_batch_size_per_gpu: Count | None = None
    ppo_max_token_len_per_gpu: Count = 32768
    ppo_epochs: Count | None = None
    cliprange_value: Positive = 0.5  # eps_v
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum"] = "token-mean"


class ColocateAsyncKeys(Settings, frozen=True, kw_only=True):
    """Rollouts that are collected ahead of their step."""

    num_warmup_batches: Count = 1  # batches of groups asked for ahead of the step that trains them


class SamplerKeys(Settings, frozen=True, kw_only=True):
    """The maximum age of groups, in versions of the policy, and the treatment of older ones."""

    max_off_policy_threshold: int = 8  # versions that a group may span
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"  # instead of a group that would span more


class V1Keys(Settings, frozen=True, kw_only=True):
    """Synchronous training, or rollouts that continue while the models learn (`rows/supply.py`)."""

    trainer_mode: Literal["sync", "colocate_async"] = "sync"
    colocate_async: ColocateAsyncKeys = ColocateAsyncKeys()
    sampler: SamplerKeys = SamplerKeys()

    @property
    def is_async(self) -> bool:
        """True if rollouts continue while the models learn."""
        return self.trainer_mode != "sync"


class OverlongBufferKeys(Settings, frozen=True, kw_only=True):
    """DAPO's penalty for long answers, off by default (`rows.soft_overlong`). `log` must stay false."""

    enable: bool = False
    len: int = 0  # L_cache: the last tokens before `max_resp_len`, in which an answer loses reward
    penalty_factor: Positive = 1.0  # reward that an answer of `max_resp_len` tokens loses
    log: bool = False


class RewardKwargsKeys(Settings, frozen=True, kw_only=True):
    """The arguments of VERL's reward manager `dapo`; the penalty counts the tokens of a call, not of a rollout."""

    overlong_buffer_cfg: OverlongBufferKeys = OverlongBufferKeys()
    max_resp_len: int | None = None  # L_max


class RewardKeys(Settings, frozen=True, kw_only=True):
    """Penalties; the rewards themselves come from the experiment."""

    reward_kwargs: RewardKwargsKeys = RewardKwargsKeys()


class TrainerKeys(Settings, frozen=True, kw_only=True):
    """The length of the training: `total_training_steps`, or else `total_epochs` over the tasks."""

    critic_warmup: int = 0  # before this step the critic alone learns
    v1: V1Keys = V1Keys()

    total_epochs: Count = 30
    total_training_steps: Count | None = None


OWN = (
    *("loss", "loss_params", "estimator", "estimator_params", "sampling", "replay", "saving", "anchor_coef"),
    *("threads", "max_nonfinite", "entropy", "probe"),
)
"""Parameters of agl next to VERL's keys, with the names and meaning that they have in `grpo` of agl-algo-torch."""


class VerlSettings(Settings, frozen=True, kw_only=True):
    """All of VERL's configuration that training in one process uses, and the parameters in `OWN`."""

    algorithm: AlgorithmKeys = AlgorithmKeys()
    data: DataKeys = DataKeys()
    actor_rollout_ref: ActorRolloutRefKeys = ActorRolloutRefKeys()
    critic: CriticKeys = CriticKeys()
    reward: RewardKeys = RewardKeys()
    trainer: TrainerKeys = TrainerKeys()
    loss: str = ""  # in place of policy_loss.loss_mode
    loss_params: dict[str, Any] = {}
    estimator: str = ""  # in place of adv_estimator
    estimator_params: dict[str, Any] = {}
    sampling: Sampling = Sampling()  # its refill takes the place of algorithm.filter_groups
    replay: Replay = Replay()
    saving: Saving = Saving()
    threads: Whole = 0  # torch's on the CPU; 0 leaves torch's choice, and is one on a cluster
    max_nonfinite: Whole = MAX_NONFINITE  # updates in a row without a finite gradient
    entropy: bool = True  # whether the entropies of tokens are measured, in one process
    probe: bool = True  # whether weights on Ray get a probe
    anchor_coef: NotNegative = 0.1  # weight of the KL on calls of agents that share the weights and are not trained

    @property
    def has_critic(self) -> bool:
        """True if the advantages are computed from a critic's values."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def actor(self) -> ActorKeys:
        """The keys for training the policy."""
        return self.actor_rollout_ref.actor

    @property
    def has_reference(self) -> bool:
        """True if a KL term needs a frozen copy of the initial policy."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def correction(self) -> Correction:
        """The correction for tokens that another policy sampled; raises ConfigError for invalid values."""
        return correction_of(self.algorithm.rollout_correction)

    @property
    def is_lora(self) -> bool:
        """True if adapters are trained instead of all weights."""
        return self.actor_rollout_ref.model.lora_rank > 0

    @property
    def is_packed(self) -> bool:
        """True if rows are packed one after the other; False while that is undecided."""
        return bool(self.actor_rollout_ref.model.use_remove_padding)

    @property
    def is_dynamic(self) -> bool:
        """True if micro-batches are cut by tokens and not by rows."""
        return self.actor.use_dynamic_bsz or not self.actor.ppo_micro_batch_size_per_gpu

    def steps(self, tasks: int) -> int:
        """Return the number of steps of the whole run, for a number of training tasks.

        A batch may span two epochs, so no task is left out, except tasks at the very end that do not fill a batch.
        """
        given = self.trainer.total_training_steps
        # epochs * tasks / batch, rounded down; a batch is never larger than the number of tasks
        return given or max(1, self.trainer.total_epochs * tasks // min(self.data.train_batch_size, tasks))


def read_settings(config: Mapping[str, Any]) -> tuple[VerlSettings, list[str]]:
    """Return the settings, from a configuration nested like VERL's, and a note on every overruled key.

    If `loss_agg_mode` is not set, it is the one that the loss requests. Raises ConfigError for keys that are unknown or
    would be ignored, and for combinations that cannot train.
    """
    own = {name: config[name] for name in OWN if name in config}
    keys = {name: value for name, value in config.items() if name not in OWN}
    used, notes = read_keys(keys, engine="inproc", shape=VerlSettings)
    own = msgspec.to_builtins(own)
    flat = {".".join(path): value for path, value in leaves(own)}
    try:
        settings = msgspec.convert(nested(used) | own, VerlSettings)
    except msgspec.ValidationError as error:
        name = found[1] if (found := re.search(r"`\$\.([\w.]+)", str(error))) else ""
        value = (used | flat).get(name)
        raise ConfigError(
            f"The VERL configuration has {name} = {value!r}: {error}. See docs/how-to/verl.md."
        ) from error
    settings = with_aggregation(settings, is_given="actor_rollout_ref.actor.loss_agg_mode" in used)
    check_settings(settings, used | flat)
    return settings, notes
