"""VERL's whole configuration for a run of agl: VERL's own file, the user's keys, and the keys that this engine needs.

Later ones have precedence: VERL's defaults, this package's, those for a machine without a GPU, the user's keys, the
needed ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from agl.contracts import POLICY_KEY_ENV
from agl_algo_verl.losses.choice import chosen_loss, loss_mode, needs_entropies
from agl_algo_verl.runtime import attention
from agl_algo_verl.serving.policy import policy_key
from agl_algo_verl.settings.keys import verl_content
from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from pathlib import Path

    from agl_algo_verl.ray.schedule import Schedule
    from agl_algo_verl.settings.ray import RaySettings

CHECKPOINTS = "global_step_{}"
"""VERL's name for the directory of a step."""

METRICS = "metrics.jsonl"
"""The file that VERL's file logger writes, in the directory of the checkpoints."""

LIBRARIES = "actor_rollout_ref.model.external_lib"
"""The key that lists the modules that VERL imports before it builds a model."""

WEIGHTS = {"fsdp2": "actor/huggingface", "megatron": "actor/model/huggingface"}
"""The folder, in the directory of a step, in which each engine of VERL saves weights in Hugging Face's format."""

FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
"""Precision on the CPU, where bfloat16 is slow."""


def compose(
    read: RaySettings,
    *,
    model: str,
    folder: Path,
    steps: int,
    tasks: int,
    checkpoint: Path | None,
    threads: int,
    before: int = 0,
    rate: float = 1.0,
) -> Any:
    """Return VERL's configuration, an OmegaConf `DictConfig`.

    Args:
        read: The user's configuration.
        model: Directory of the weights to start from.
        folder: Directory for checkpoints; on several machines, one that all of them can access.
        steps: Number of steps that VERL has to take.
        tasks: Number of tasks per step.
        checkpoint: The directory of the step after which to continue; None to start from `model`.
        threads: Torch's threads in a process on the CPU; 0 for one.
        before: Number of steps completed before VERL's count began.
        rate: Factor of the policy's configured learning rate.
    """
    omega: Any = verl_part("omegaconf:OmegaConf")
    config = omega.create(verl_content(read.strategy))
    needed = _needed(read, model=model, folder=folder, steps=steps, tasks=tasks, checkpoint=checkpoint)
    needed |= _critic(read, model=model, before=before) if read.settings.has_critic else {}
    if read.settings.is_lora and not read.is_cpu:
        # A replica serves adapters only to VERL's own client; other clients would get the weights without them.
        needed["actor_rollout_ref.model.lora.merge"] = True
    here = _on_cpu(threads) if read.is_cpu else {}
    needed |= _worker(read, rate=rate)
    for name, value in {**_defaults(read), **here, **read.given, **needed}.items():
        omega.update(config, name, value, force_add=True)
    omega.set_struct(config, True)  # a key that VERL asks for and nobody has is an error, as with VERL's own programs
    return config


def _defaults(read: RaySettings) -> dict[str, Any]:
    """Return the defaults of this package that differ from VERL's; docs/how-to/verl.md lists them."""
    actor, settings = read.settings.actor, read.settings
    return {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.n": settings.actor_rollout_ref.rollout.n,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,  # VERL's 2 needs two GPUs
        # VERL's own bounds are 0.2, whatever clip_ratio is, so they are always set.
        "actor_rollout_ref.actor.clip_ratio_low": actor.number("clip_ratio_low"),
        "actor_rollout_ref.actor.clip_ratio_high": actor.number("clip_ratio_high"),
        "actor_rollout_ref.model.use_remove_padding": settings.is_packed,
        "actor_rollout_ref.model.override_config.attn_implementation": attention(use_remove_padding=settings.is_packed),
        "actor_rollout_ref.model.enable_gradient_checkpointing": (
            settings.actor_rollout_ref.model.enable_gradient_checkpointing
        ),
    }


def _worker(read: RaySettings, *, rate: float) -> dict[str, Any]:
    """Return the keys that set this package's training worker: its loss, a reduced learning rate, and an anchor."""
    choice = chosen_loss(read.settings)
    named = read.given.get(LIBRARIES)
    theirs = cast("list[str]", named if isinstance(named, list) else [named] if named else [])
    worker: dict[str, Any] = {LIBRARIES: [*theirs, "agl_algo_verl.ray.preparation"]}
    if read.holds and not read.settings.actor.use_kl_loss:
        # The anchor needs VERL's reference, which VERL runs only for a KL term; this one has weight 0.
        worker |= {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.0}
    if rate != 1.0:
        worker["actor_rollout_ref.actor.optim.lr"] = rate * read.settings.actor.optim.lr
    if choice is None:
        return worker
    if needs_entropies(read.settings):
        worker["actor_rollout_ref.actor.calculate_entropy"] = True
    return worker | {
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss_mode(read.settings),
        "actor_rollout_ref.actor.loss_agg_mode": read.settings.actor.loss_agg_mode,
    }


def _critic(read: RaySettings, *, model: str, before: int) -> dict[str, Any]:
    """Return the keys for VERL's critic, which starts from the policy's network and uses VERL's GAE."""
    critic = read.settings.critic
    own: dict[str, Any] = {
        "algorithm.adv_estimator": "gae",
        "critic.enable": True,
        "critic.strategy": "fsdp2",
        "critic.use_dynamic_bsz": True,
        "critic.model.path": model,
        "critic.model.use_remove_padding": read.settings.is_packed,
        "critic.model.override_config.attn_implementation": attention(use_remove_padding=read.settings.is_packed),
        "critic.model.enable_gradient_checkpointing": critic.model.enable_gradient_checkpointing,
        "critic.ppo_infer_max_token_len_per_gpu": critic.ppo_max_token_len_per_gpu,  # what VERL reads for training
        "trainer.critic_warmup": max(0, read.settings.trainer.critic_warmup - before),  # in VERL's count of steps
    }
    if read.is_cpu:
        own |= {
            "critic.fsdp.use_torch_compile": False,
            "critic.fsdp.mixed_precision": FLOAT32,
        }
    return own


def _on_cpu(threads: int) -> dict[str, Any]:
    """Return the keys that have only one possible value on the CPU, or only one that is fast enough."""
    return {
        "trainer.device": "cpu",
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision": FLOAT32,
        # The reference computes as the policy does, or the first distance from it would not be 0.
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.mixed_precision": FLOAT32,
        "actor_rollout_ref.rollout.load_format": "auto",  # a replica loads the model itself, so adapters are enough
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.engine_kwargs.agl_hf.threads": threads or 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def _needed(
    read: RaySettings, *, model: str, folder: Path, steps: int, tasks: int, checkpoint: Path | None
) -> dict[str, Any]:
    """Return the keys that make VERL's trainer use agl's tasks, rollouts, advantages, checkpoints and metrics."""
    contents = ["model", "optimizer", "extra", "hf_model"]
    return {
        "algorithm.adv_estimator": "agl",  # advantages come with the rows (`loops.as_given`)
        "data.train_files": [],
        "data.val_files": [],
        "data.shuffle": False,
        "data.train_batch_size": tasks,
        "data.dataloader_num_workers": 0,
        "data.custom_cls.path": "pkg://agl_algo_verl.ray.loops",
        "data.custom_cls.name": "EmptyTasks",
        "reward.num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.strategy": read.strategy,
        "actor_rollout_ref.ref.strategy": read.strategy,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": tasks,
        "actor_rollout_ref.actor.checkpoint.save_contents": contents,
        "actor_rollout_ref.actor.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.skip_tokenizer_init": False,  # agents send text
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "agl_algo_verl.ray.loops.AgentLoops",
        "trainer.v1.trainer_mode": "sync",  # what is collected ahead is agl's
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": steps + 1,  # an epoch is one step here; total_training_steps is what ends the run
        "trainer.save_freq": 1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.logger": ["file"],
        "trainer.default_local_dir": str(folder),
        "trainer.resume_mode": "resume_path" if checkpoint else "disable",
        "trainer.resume_from_path": str(checkpoint) if checkpoint else None,
        "transfer_queue.enable": True,
    }


def environment(read: RaySettings, *, folder: Path, threads: int, schedule: Schedule | None = None) -> dict[str, str]:
    """Return the environment variables for all processes of the cluster; `schedule` is included if VERL uses FSDP2."""
    common = {
        "VERL_FILE_LOGGER_PATH": str(folder / METRICS),
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        POLICY_KEY_ENV: policy_key(),
    }
    if schedule is not None and read.strategy == "fsdp2":
        common |= schedule.variables()
    if not read.is_cpu:
        return common
    return common | {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered under that name only
        "VERL_USE_EXTERNAL_MODULES": "agl_algo_verl.ray.process",
        "OMP_NUM_THREADS": str(threads or 1),
    }


def module_path(folder: Path) -> dict[str, str]:
    """Return the `PYTHONPATH` with which all processes of the cluster find the modules in an experiment's folder.

    A loss may be one of them. On several machines the folder must exist everywhere, or the module be installed.
    """
    own = [str(folder.absolute()), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, own))}
