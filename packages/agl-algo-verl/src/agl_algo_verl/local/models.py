"""VERL's training workers, opened for a role: the policy in training, its frozen reference, its critic.

All three are VERL's `TrainingWorker` with its FSDP2 engine; they differ in their configuration. The policy learns by a
loss of agl-objectives (`loss_worker.py`), or by VERL's `ppo_loss`. With rho_t = pi(y_t) / pi_old(y_t), A_t the
advantage and w_t the importance weight of `batches.importance` (1 without a correction), VERL's loss of a trained token
is L_t = w_t * l_t with

    vanilla   l_t = max(-A_t * rho_t, -A_t * clip(rho_t, 1 - eps_low, 1 + eps_high)), at most -c * A_t where A_t < 0
    gspo      the same without the bound c, and with the row's s in place of rho_t:
              s = exp(mean over the row's trained tokens of log pi(y_t) - log pi_old(y_t))

The loss of an update is mean(L_t) - entropy_coeff * mean(entropy_t) + kl_loss_coef * mean(KL_t), where the last two
terms are optional. `loss_agg_mode` selects the mean:

    token-mean               sum over the update's tokens / their number
    seq-mean-token-sum       sum over the update's tokens / its rollouts
    seq-mean-token-sum-norm  the same / loss_scale_factor
    seq-mean-token-mean      the mean over rollouts of the mean over each one's tokens

Sources: the clipped objective is PPO's (Schulman et al. 2017, arXiv 1707.06347, section 3). The bound c is that of
dual-clip PPO (Ye et al. 2020, arXiv 1912.09729). Separate eps_low and eps_high, and the mean over tokens, are DAPO's
(Yu et al. 2025, arXiv 2503.14476, sections 3.1 and 3.3). The constant divisor is that of Dr. GRPO (arXiv 2503.20783).
The sequence's ratio is GSPO's (Zheng et al. 2025, arXiv 2507.18071, section 4).

Deviations from VERL, whose sequences are rows: here means over sequences are over rollouts (`rows/batches.py`). Only
GSPO's s is per row, because the model reads a row in one piece.

On a GPU the reference is forward-only, and VERL keeps such a model in the CPU's memory. On the CPU VERL would ask for
pinned memory, which needs a GPU, so there the reference is a worker whose optimizer never steps and so holds no
moments.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from agl.errors import ConfigError
from agl_algo_verl.losses.choice import loss_mode
from agl_algo_verl.privates import open_as_language_model
from agl_algo_verl.runtime import attention
from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from agl_algo_verl.settings.settings import FsdpKeys, OptimKeys, VerlSettings

Role = Literal["actor", "reference"]
Kind = Literal["language_model", "value_model"]


def open_policy(path: str, settings: VerlSettings, *, role: Role, steps: int, device: torch.device) -> Any:
    """Return a worker for the language model at `path`, with VERL's `ppo_loss`.

    `steps` is the length of the learning-rate schedule. Raises ConfigError for a model that cannot be loaded.
    """
    model, actor = settings.actor_rollout_ref.model, settings.actor
    # A reference gets no adapters: it is the model at the start, where B = 0 and adapters have no effect.
    is_lora = role == "actor" and settings.is_lora
    adapters: dict[str, Any] = {"lora_rank": model.lora_rank, "lora_alpha": model.lora_alpha} if is_lora else {}
    if is_lora:
        modules = model.target_modules
        adapters["target_modules"] = modules if isinstance(modules, str) else list(modules)
        adapters["exclude_modules"] = model.exclude_modules
    loaded = model_config(
        path,
        use_remove_padding=settings.is_packed,
        enable_gradient_checkpointing=model.enable_gradient_checkpointing and role == "actor",
        **adapters,
    )
    worker = open_worker(
        "language_model",
        loaded,
        engine=engine_config(
            actor.fsdp_config,
            device=device,
            tokens=actor.ppo_max_token_len_per_gpu,
            rows=actor.ppo_micro_batch_size_per_gpu,
            is_forward_only=role == "reference" and device.type == "cuda",
        ),
        optim=actor.optim,
        steps=steps,
    )
    worker.set_loss_fn(partial(verl_part("verl.workers.utils.losses:ppo_loss"), config=actor_config(settings)))
    return worker


def model_config(path: str, *, use_remove_padding: bool, **options: Any) -> Any:
    """Return VERL's description of the model at `path`; raises ConfigError if the model cannot be loaded."""
    try:
        return verl_part("verl.workers.config:HFModelConfig")(
            path=path,
            use_remove_padding=use_remove_padding,
            override_config={"attn_implementation": attention(use_remove_padding=use_remove_padding)},
            **options,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The model {path!r} cannot be loaded: {error}. "
            "Give a directory in Hugging Face's format (config.json, model.safetensors, tokenizer.json) or a hub name."
        ) from error


def actor_config(settings: VerlSettings) -> Any:
    """Return VERL's own configuration of the policy loss; for the symbols see the module's docstring."""
    actor = settings.actor
    return verl_part("verl.workers.config:FSDPActorConfig")(
        strategy="fsdp2",
        rollout_n=settings.actor_rollout_ref.rollout.n,
        use_dynamic_bsz=True,  # how micro-batches are really cut is said per batch (`batches.micro_batched`)
        clip_ratio=actor.clip_ratio,  # eps, where the two below are not given
        # VERL's defaults of these two are 0.2, whatever clip_ratio is, so they are always set.
        clip_ratio_low=actor.number("clip_ratio_low"),  # eps_low
        clip_ratio_high=actor.number("clip_ratio_high"),  # eps_high
        clip_ratio_c=actor.clip_ratio_c,  # c; a bad token that has become likely would have no bound on its loss
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,  # a constant, such as the longest response
        entropy_coeff=actor.entropy_coeff,  # weight of a bonus for entropy
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,  # beta of the KL to the reference in the loss
        kl_loss_type=actor.kl_loss_type,  # its estimate; with "+" the gradient is k2's, which is unbiased
        policy_loss=verl_part("verl.workers.config:PolicyLossConfig")(loss_mode=loss_mode(settings)),
    )


def engine_config(
    fsdp: FsdpKeys, *, device: torch.device, tokens: int, rows: int | None, is_forward_only: bool = False
) -> Any:
    """Return the configuration of VERL's FSDP2 engine.

    A micro-batch has `rows` rows; if `rows` is None, it has up to `tokens` tokens.
    """
    precision = fsdp.mixed_precision
    return verl_part("verl.workers.config:FSDPEngineConfig")(
        strategy="fsdp2",
        model_dtype=fsdp.model_dtype,  # of the weights that the optimizer updates
        mixed_precision={
            # the dtype of the forward and backward pass; bfloat16 is slow on CPUs
            "param_dtype": precision.param_dtype or ("fp32" if device.type == "cpu" else "bf16"),
            "reduce_dtype": precision.reduce_dtype,  # gradients are summed in it
            "buffer_dtype": precision.buffer_dtype,
        },
        param_offload=fsdp.param_offload,
        optimizer_offload=fsdp.optimizer_offload,
        use_torch_compile=False,
        use_dynamic_bsz=rows is None,
        max_token_len_per_gpu=tokens,
        infer_max_token_len_per_gpu=tokens,
        micro_batch_size_per_gpu=rows,
        infer_micro_batch_size_per_gpu=rows,
        forward_only=is_forward_only,
    )


def open_worker(kind: Kind, model: Any, *, engine: Any, optim: OptimKeys, steps: int) -> Any:
    """Return a training worker with its model loaded."""
    cast("Any", torch).manual_seed(0)  # adapters and value heads are drawn at random; here always the same ones
    worker = verl_part("agl_algo_verl.losses.loss_worker:LossWorker")(
        verl_part("verl.workers.config:TrainingWorkerConfig")(
            model_type=kind,
            model_config=model,
            engine_config=engine,
            optimizer_config=_optimizer(optim, steps=steps),
            checkpoint_config=verl_part("verl.trainer.config:CheckpointConfig")(),
        )
    )
    open_as_language_model(worker)
    worker.reset()
    return worker


def _optimizer(optim: OptimKeys, *, steps: int) -> Any:
    return verl_part("verl.workers.config:FSDPOptimizerConfig")(
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        lr_scheduler_type=optim.lr_scheduler_type,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        total_training_steps=steps,
    )
