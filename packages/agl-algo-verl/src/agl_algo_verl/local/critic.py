"""VERL's critic in this process: the policy's network with a value per token, trained by VERL's `value_loss`.

With V the value, V_old the one before the step's first update and R the return, the loss of a trained token is PPO's
with a clipped value, as OpenAI's baselines have it; it stays near V_old, as the policy's ratio stays near 1:

    L_t = 0.5 * max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2)        eps_v = critic.cliprange_value

and the loss of an update is its mean over tokens, or over rollouts of the sum over tokens, by `critic.loss_agg_mode`.

Deviation from VERL, which opens a value model with flash-attention and nothing else: here its engine is asked for a
token classifier with one label, which is the same network, by VERL's own loader of language models, with the
attention that the policy has.

R is also the axis of a response's tokens in `[R]`.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError
from agl_algo_verl.local.models import engine_config, model_config, open_worker
from agl_algo_verl.losses.metrics import plain_metrics
from agl_algo_verl.privates import with_own_settings
from agl_algo_verl.rows.batches import micro_batched, responses
from agl_algo_verl.typed import verl_part
from agl_objectives.directories import prune, step_directory, write_directory

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from agl_algo_verl.rows.rows import RowSample
    from agl_algo_verl.settings.settings import CriticKeys, VerlSettings


class VerlCritic:
    """A value model in training.

    Args:
        path: The policy's weights, whose network the critic starts from, with a value head of its own.
        settings: VERL's configuration.
        steps: Steps of the whole run, over which the learning rate is scheduled.
        device: Where the policy is trained.

    Raises:
        ConfigError: The model's family has no token classifier.
    """

    def __init__(self, path: str, *, settings: VerlSettings, steps: int, device: torch.device) -> None:
        self._settings, self._device = settings.critic, device
        self._worker = _open(path, settings, steps=steps, device=device)

    def values(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return the value before each token of the responses, [R] per sample on the CPU."""
        if not samples:
            return []
        # V_t must not know token t: `responses` takes the outputs one place before each token.
        return responses(self._worker.infer_batch(self._batch(samples, compute_loss=False))["values"], samples)

    def update(self, samples: Sequence[RowSample], *, rollouts: int, is_last: bool) -> dict[str, float]:
        """Do one optimizer update towards the samples' `returns` and return what to log.

        `is_last` says that it is the last of its step, which moves the schedule of the learning rate.
        """
        # VERL divides a mean over sequences by `global_batch_size`: here rollouts and not rows, as for the policy.
        batch = self._batch(samples, global_batch_size=rollouts, update_lr_scheduler=is_last)
        found = plain_metrics(self._worker.train_batch(batch)["metrics"])
        # vf_loss, vf_clipfrac and vpred_mean are the critic's alone; grad_norm and lr the policy reports as well.
        return {name if name.startswith("v") else f"critic_{name}": value for name, value in found.items()}

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write a checkpoint next to the policy's and remove old ones, except the last `keep`, two and `kept`."""

        def fill(directory: Path) -> None:
            self._worker.save_checkpoint(str(directory), global_step=step)

        write_directory(step_directory(workdir / "critic", step), fill)
        prune(workdir / "critic", step=step, keep=max(2, keep), kept=kept)

    def load(self, workdir: Path, *, step: int) -> None:
        """Continue from the checkpoint of a step, with the learning rate of the settings.

        Raises ConfigError where there is none.
        """
        source = step_directory(workdir / "critic", step)
        if not source.is_dir():
            raise ConfigError(
                f"There is no checkpoint of the critic in {source}. "
                "Resume where the run's files are, or start the run under a new name."
            )
        with with_own_settings(self._worker.engine):
            self._worker.load_checkpoint(str(source), del_local_after_load=False)

    def _batch(self, samples: Sequence[RowSample], **options: Any) -> Any:
        critic = self._settings
        rows, tokens = critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu
        return micro_batched(samples, rows=rows, tokens=tokens, device=self._device, **options)


def critic_config(critic: CriticKeys) -> Any:
    """Return VERL's own configuration of the value loss."""
    return verl_part("verl.workers.config:FSDPCriticConfig")(
        strategy="fsdp2",
        use_dynamic_bsz=True,  # how micro-batches are really cut is said per batch (`batches.micro_batched`)
        cliprange_value=critic.cliprange_value,  # eps_v
        loss_agg_mode=critic.loss_agg_mode,
    )


def check_model(path: str) -> None:
    """Raise ConfigError for a model that cannot be found, or whose family has no token classifier."""
    from transformers import AutoConfig

    try:
        config = cast("Any", AutoConfig).from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The model {path!r} cannot be loaded: {error}. "
            "Give a directory in Hugging Face's format (config.json, model.safetensors, tokenizer.json) or a hub name."
        ) from error
    check_family(config, path=path)


def check_family(config: Any, *, path: str) -> None:
    """Raise ConfigError for a model whose family has no token classifier."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    if type(config) not in cast("Any", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING):
        raise ConfigError(
            f"The model {path!r} is a {config.model_type}, of which transformers has no token classifier, and VERL's "
            'critic is one. Use algorithm.adv_estimator = "grpo", which needs no critic, or another model.'
        )


def _open(path: str, settings: VerlSettings, *, steps: int, device: torch.device) -> Any:
    critic = settings.critic
    loaded = model_config(
        path,
        use_remove_padding=settings.is_packed,
        enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing,
    )
    config = loaded.hf_config
    check_family(config, path=path)
    # One label per token is the value. No dropout: V_old and V would differ by it alone.
    config.num_labels, config.classifier_dropout = 1, 0.0
    config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
    engine = engine_config(
        critic.fsdp,
        device=device,
        tokens=critic.ppo_max_token_len_per_gpu,
        rows=critic.ppo_micro_batch_size_per_gpu,
    )
    # Values are a view of the head's output; FSDP2 warns of in-place changes to it, and VERL makes none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDP\w+ForTokenClassification\) returned a view")
    with _quietly():
        worker = open_worker("value_model", loaded, engine=engine, optim=critic.optim, steps=steps)
    loss = verl_part("verl.workers.utils.losses:value_loss")
    worker.set_loss_fn(partial(loss, config=critic_config(critic)))
    return worker


@contextmanager
def _quietly() -> Generator[None]:
    """Keep transformers, inside the block, from reporting that the value head is new, as every critic's is."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
