"""VERL's training worker in this process: opened from published weights, updated, saved, and exported again.

The worker is VERL's `TrainingWorker` with its FSDP2 engine and `ppo_loss`; nothing here computes a loss.
Everything here blocks; the algorithm calls it in a thread.

Files: a training checkpoint is VERL's own (sharded model, optimizer, scheduler and random state, which torch pickles,
so load only your own); what is published is a Hugging Face directory. Both appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_verl.rows import batch, fill_up, per_rollout
from agl_algo_verl.runtime import prepare
from agl_algo_verl.typed import integers, verl_part

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from agl_algo_verl.rows import Sample
    from agl_algo_verl.settings import Settings

ORIGIN = "origin.json"
"""In a checkpoint: the weights that the model was opened from."""


class Worker:
    """One model in training.

    Args:
        origin: Weights in Hugging Face's format.
        settings: VERL's configuration.
        steps: Steps in all, which a schedule of the learning rate is stretched over.
        threads: Torch's threads in the calling thread; 0 leaves them.

    Raises:
        ConfigError: VERL is not usable here, or the weights cannot be trained by it.
    """

    def __init__(self, *, origin: Weights, settings: Settings, steps: int, threads: int) -> None:
        self.origin = origin
        self._settings, self._threads = settings, threads
        self.use_threads()
        self._device = prepare()
        check_device(settings, self._device)
        self._worker = _open(origin.uri, settings, steps=steps, device=self._device)

    @classmethod
    def resume(cls, source: Path, *, settings: Settings, steps: int, threads: int) -> Worker:
        """Open the checkpoint that `save` wrote: weights, moments, schedule and random state."""
        if not (source / ORIGIN).is_file():
            raise ConfigError(
                f"There is no training checkpoint in {source}: {ORIGIN} is absent. "
                "Resume where the run's files are, or start the run under a new name."
            )
        origin = Weights(uri=json.loads((source / ORIGIN).read_text(encoding="utf-8"))["uri"])
        worker = cls(origin=origin, settings=settings, steps=steps, threads=threads)
        worker._worker.load_checkpoint(str(source), del_local_after_load=False)
        return worker

    def use_threads(self) -> None:
        """Give torch the configured number of threads in the calling thread; one is fastest for tiny models."""
        if self._threads:
            torch.set_num_threads(self._threads)

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the engine's log-probabilities of each sample's response, [R] per sample on the CPU."""
        if not samples:
            return []
        self.use_threads()
        data = self._batch(samples, compute_loss=False, calculate_entropy=False)
        found = self._worker.infer_batch(data)["log_probs"]
        values, offsets = found.values().float().cpu(), integers(found.offsets())
        return [
            values[start + s.prompt - 1 : start + len(s.ids) - 1] for s, start in zip(samples, offsets, strict=False)
        ]

    def update(self, samples: Sequence[Sample], *, rollouts: int, is_last: bool) -> dict[str, float]:
        """Do one optimizer update on the rows of `rollouts` rollouts; `is_last` of its step moves the schedule."""
        self.use_threads()
        actor = self._settings.actor
        if actor.loss_agg_mode == "seq-mean-token-mean":
            samples = per_rollout(samples)
        options: dict[str, Any] = {
            "global_batch_size": rollouts,
            "update_lr_scheduler": is_last,
            "calculate_entropy": actor.entropy_coeff != 0.0,
        }
        correction = self._settings.algorithm.rollout_correction
        if correction.rollout_is:
            options["is_threshold"] = correction.rollout_is_threshold
        output = self._worker.train_batch(self._batch(samples, **options))
        metrics = cast("dict[str, Any]", output["metrics"])
        return {_name(name): _number(value) for name, value in metrics.items() if not name.startswith("perf/")}

    def save(self, workdir: Path, *, step: int, keep: int) -> None:
        """Write a training checkpoint and remove those of steps before the last `keep`, which is two at least.

        The one before stays because the run's state names it until the new state is saved.
        """

        def fill(directory: Path) -> None:
            self._worker.save_checkpoint(str(directory), global_step=step)
            (directory / ORIGIN).write_text(json.dumps({"uri": self.origin.uri}), encoding="utf-8")

        write_directory(step_directory(workdir / "state", step), fill)
        prune(workdir / "state", step=step, keep=max(2, keep))

    def export(self, workdir: Path, *, step: int, keep: int) -> Weights:
        """Write the weights to serve as a Hugging Face directory and return the resource that names it."""
        target = step_directory(workdir.absolute() / "weights", step)
        write_directory(target, self._fill)
        prune(workdir / "weights", step=step, keep=keep)
        return Weights(uri=str(target), format="hf")

    def _fill(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        engine = self._worker.engine
        state = {name: tensor.detach().cpu() for name, tensor in engine.get_per_tensor_param()[0]}
        config = engine.model_config.hf_config
        with torch.device("meta"):
            shell = cast("Any", AutoModelForCausalLM).from_config(config)
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        with no_bars():
            shell.save_pretrained(directory, state_dict=state)
        engine.model_config.tokenizer.save_pretrained(directory)

    def _batch(self, samples: Sequence[Sample], **options: Any) -> TensorDict:
        settings = self._settings
        rows = 0 if settings.is_dynamic else settings.actor.ppo_micro_batch_size_per_gpu or 1
        sizes = {"use_dynamic_bsz": settings.is_dynamic, "max_token_len_per_gpu": self._most_tokens(samples)}
        if rows:
            samples = fill_up(samples, multiple=rows)
            sizes["micro_batch_size_per_gpu"] = rows
        return cast("Any", batch(samples, **sizes, **options)).to(self._device)

    def _most_tokens(self, samples: Sequence[Sample]) -> int:
        """The token budget of a micro-batch; VERL refuses one below the longest row, which then comes alone."""
        return max(self._settings.actor.ppo_max_token_len_per_gpu, *(len(s.ids) for s in samples))


@contextmanager
def no_bars() -> Generator[None]:
    """Keep transformers from drawing progress bars over an experiment's own inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_device(settings: Settings, device: torch.device) -> None:
    """Raise ConfigError for settings that this machine cannot run."""
    fsdp, model = settings.actor.fsdp_config, settings.actor_rollout_ref.model
    if device.type == "cuda":
        return
    asked = {
        "actor_rollout_ref.actor.fsdp_config.param_offload": fsdp.param_offload,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": fsdp.optimizer_offload,
        "actor_rollout_ref.model.use_remove_padding": model.use_remove_padding,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": fsdp.mixed_precision.param_dtype == "fp16",
    }
    wrong = [name for name, is_asked in asked.items() if is_asked]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} need a GPU, and this machine has none that torch can use. "
            "Remove them here, or run the experiment where a GPU is."
        )


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` on a temporary directory beside `target`, flush it to disk and rename it to `target`.

    A `target` that exists is replaced; leftovers of an earlier crash are removed.
    """
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    fill(fresh)
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def step_directory(parent: Path, step: int) -> Path:
    """Return where a step's files are; names sort as steps do."""
    return parent / f"{step:06d}"


def prune(parent: Path, *, step: int, keep: int) -> None:
    """Remove the directories of steps before the last `keep`, counted back from `step`."""
    oldest = step_directory(parent, max(0, step - keep + 1)).name
    for path in parent.glob("[0-9]*"):
        if path.is_dir() and path.name < oldest:
            shutil.rmtree(path, ignore_errors=True)


def _open(path: str, settings: Settings, *, steps: int, device: torch.device) -> Any:
    model = settings.actor_rollout_ref.model
    attention = "flash_attention_2" if model.use_remove_padding else "sdpa"
    try:
        loaded = verl_part("verl.workers.config:HFModelConfig")(
            path=path,
            use_remove_padding=model.use_remove_padding,
            enable_gradient_checkpointing=model.enable_gradient_checkpointing,
            override_config={"attn_implementation": attention},
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The model {path!r} cannot be loaded: {error}. "
            "Give a directory in Hugging Face's format (config.json, model.safetensors, tokenizer.json) or a hub name."
        ) from error
    worker = verl_part("verl.workers.engine_workers:TrainingWorker")(
        verl_part("verl.workers.config:TrainingWorkerConfig")(
            model_type="language_model",
            model_config=loaded,
            engine_config=_engine(settings, device),
            optimizer_config=_optimizer(settings, steps=steps),
            checkpoint_config=verl_part("verl.trainer.config:CheckpointConfig")(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(verl_part("verl.workers.utils.losses:ppo_loss"), config=actor_config(settings)))
    return worker


def actor_config(settings: Settings) -> Any:
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
        policy_loss=verl_part("verl.workers.config:PolicyLossConfig")(loss_mode=actor.policy_loss.loss_mode),
    )


def _engine(settings: Settings, device: torch.device) -> Any:
    fsdp, actor = settings.actor.fsdp_config, settings.actor
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
        use_dynamic_bsz=settings.is_dynamic,
        max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        infer_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
        infer_micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
    )


def _optimizer(settings: Settings, *, steps: int) -> Any:
    optim = settings.actor.optim
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


def _name(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _number(value: Any) -> float:
    """One number of what VERL reports: a number, a list over ranks or micro-batches, or its own metric."""
    if isinstance(value, verl_part("verl.utils.metric:Metric")):
        return float(value.aggregate())
    if isinstance(value, list):
        parts = [_number(part) for part in cast("list[Any]", value)]
        return sum(parts) / len(parts) if parts else 0.0
    return float(value)
