"""VERL's training workers, opened for a role: the policy in training, its frozen reference, its critic.

All three are VERL's `TrainingWorker` with its FSDP2 engine; what differs is the configuration that they are given.

The reference is forward-only on a GPU, where VERL keeps such a model in the CPU's memory. On the CPU VERL would ask
for pinned memory, which needs a GPU, so there it is a worker whose optimizer never steps and so never holds moments.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from agl.errors import ConfigError
from agl_algo_verl.runtime import attention
from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from agl_algo_verl.settings import FsdpKeys, OptimKeys, VerlSettings

Role = Literal["actor", "reference"]
Kind = Literal["language_model", "value_model"]


def open_policy(path: str, settings: VerlSettings, *, role: Role, steps: int, device: torch.device) -> Any:
    """Return a worker on the language model at `path`, with VERL's `ppo_loss`; `steps` stretch the schedule.

    Raises ConfigError for a model that cannot be loaded.
    """
    model, actor = settings.actor_rollout_ref.model, settings.actor
    is_lora = role == "actor" and settings.is_lora
    adapters: dict[str, Any] = {"lora_rank": model.lora_rank, "lora_alpha": model.lora_alpha} if is_lora else {}
    if is_lora:
        modules = model.target_modules
        adapters["target_modules"] = modules if isinstance(modules, str) else list(modules)
        adapters["exclude_modules"] = model.exclude_modules
    loaded = model_config(
        path,
        use_remove_padding=model.use_remove_padding,
        enable_gradient_checkpointing=model.enable_gradient_checkpointing and role == "actor",
        **adapters,
    )
    worker = start(
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
    """Return VERL's description of the model at `path`; raises ConfigError where there is none."""
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
    """Return VERL's own configuration of the policy loss."""
    actor = settings.actor
    return verl_part("verl.workers.config:FSDPActorConfig")(
        strategy="fsdp2",
        rollout_n=settings.actor_rollout_ref.rollout.n,
        use_dynamic_bsz=True,
        clip_ratio=actor.clip_ratio,
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
        entropy_coeff=actor.entropy_coeff,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        policy_loss=verl_part("verl.workers.config:PolicyLossConfig")(loss_mode=actor.policy_loss.loss_mode),
    )


def engine_config(
    fsdp: FsdpKeys, *, device: torch.device, tokens: int, rows: int | None, is_forward_only: bool = False
) -> Any:
    """Return VERL's configuration of its FSDP2 engine: micro-batches of `rows` rows, or cut by `tokens`."""
    precision = fsdp.mixed_precision
    return verl_part("verl.workers.config:FSDPEngineConfig")(
        strategy="fsdp2",
        model_dtype=fsdp.model_dtype,
        mixed_precision={
            "param_dtype": precision.param_dtype or ("fp32" if device.type == "cpu" else "bf16"),
            "reduce_dtype": precision.reduce_dtype,
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


def start(kind: Kind, model: Any, *, engine: Any, optim: OptimKeys, steps: int) -> Any:
    """Return a training worker with its model loaded; adapters and value heads start from the same numbers always."""
    cast("Any", torch).manual_seed(0)
    worker = verl_part("verl.workers.engine_workers:TrainingWorker")(
        verl_part("verl.workers.config:TrainingWorkerConfig")(
            model_type=kind,
            model_config=model,
            engine_config=engine,
            optimizer_config=_optimizer(optim, steps=steps),
            checkpoint_config=verl_part("verl.trainer.config:CheckpointConfig")(),
        )
    )
    # VERL loads a value model with flash-attention only; by its loader of language models it gets what `model` says.
    worker.model_config.model_type = "language_model"
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


def use_rate_of_schedule(engine: Any) -> None:
    """Give the optimizer the rate of its schedule's next update.

    A checkpoint brings the rate that was next when it was saved. Where the run has more steps than it had then, the
    schedule falls more slowly.
    """
    scheduler = engine.lr_scheduler
    places = zip(engine.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, rate, shape in places:
        group["lr"] = rate * shape(scheduler.last_epoch)
