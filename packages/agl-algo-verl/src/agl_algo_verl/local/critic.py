"""VERL's critic in this process: the policy's network with a value per token, trained by VERL's `value_loss`.

V is the value, V_old the value before the step's first update, and R the return. The loss of a trained token is PPO's
with a clipped value, as in OpenAI's baselines; V is kept near V_old, as the policy's ratio is kept near 1:

    L_t = 0.5 * max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2)        eps_v = critic.cliprange_value

The loss of an update is the mean of L_t over tokens, or the mean over rollouts of its sum over tokens, as
`critic.loss_agg_mode` selects.

Deviation from VERL, which opens value models only with flash-attention: here VERL's own loader of language models opens
a token classifier with one label, which is the same network, with the attention that the policy has.

R is also the axis of a response's tokens, as in `[R]`.
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
from agl_objectives.directories import damage, prune, step_directory, write_directory

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
        path: The policy's weights, from which the critic's network starts; it gets a value head of its own.
        settings: VERL's configuration.
        steps: Steps of the whole run, for the schedule of the learning rate.
        device: The device on which the policy is trained.

    Raises:
        ConfigError: The model's family has no token classifier.
    """

    def __init__(self, path: str, *, settings: VerlSettings, steps: int, device: torch.device) -> None:
        self._settings, self._device = settings.critic, device
        # V and pi share no weights: a shared body would need a coefficient that weighs the two losses.
        self._worker = _open(path, settings, steps=steps, device=device)

    def values(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return V before each token of the responses, [R] per sample on the CPU."""
        if not samples:
            return []
        # V_t must not depend on token t: `responses` takes the outputs one position before each token.
        return responses(self._worker.infer_batch(self._batch(samples, compute_loss=False))["values"], samples)

    def update(self, samples: Sequence[RowSample], *, rollouts: int, is_last: bool) -> dict[str, float]:
        """Do one optimizer update towards the samples' `returns`; returns the metrics to log.

        `is_last` marks the last update of a step, after which the learning-rate schedule advances.
        """
        # VERL divides a mean over sequences by `global_batch_size`: the number of rollouts, not of rows, as for the
        # policy.
        # (V - R)^2 has its minimum at V = E[R | prefix], the baseline that removes most of the variance of A = R - V.
        batch = self._batch(samples, global_batch_size=rollouts, update_lr_scheduler=is_last)
        # One step of AdamW on the mean of L_t, over all micro-batches together.
        found = plain_metrics(self._worker.train_batch(batch)["metrics"])
        # vf_loss, vf_clipfrac and vpred_mean exist only for the critic; the policy also reports grad_norm and lr.
        return {name if name.startswith("v") else f"critic_{name}": value for name, value in found.items()}

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write a checkpoint next to the policy's and remove old ones, except the newest `keep` and the steps `kept`.

        At least two checkpoints stay.
        """

        def fill(directory: Path) -> None:
            self._worker.save_checkpoint(str(directory), global_step=step)

        write_directory(step_directory(workdir / "critic", step), fill)
        prune(workdir / "critic", step=step, keep=max(2, keep), kept=kept)

    def load(self, workdir: Path, *, step: int) -> None:
        """Continue from the checkpoint of a step, with the learning rate of the settings.

        Raises ConfigError if the checkpoint does not exist.
        """
        source = step_directory(workdir / "critic", step)
        if problem := damage(source):
            raise ConfigError(
                f"There is no whole checkpoint of the critic in {source}: {problem}. "
                "Resume where the run's files are, or start the run under a new name."
            )
        # Moments and schedule come from the checkpoint; learning rate, betas and weight decay from the settings.
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
        # The gradient does not depend on micro-batches: L_t is summed and divided by the count of the whole update.
        use_dynamic_bsz=True,  # how micro-batches are really cut is said per batch (`batches.micro_batched`)
        cliprange_value=critic.cliprange_value,  # eps_v
        loss_agg_mode=critic.loss_agg_mode,
    )


def check_model(path: str) -> None:
    """Raise ConfigError if a model cannot be found, or its family has no token classifier."""
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
    """Raise ConfigError if a model's family has no token classifier."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    if type(config) not in cast("Any", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING):
        raise ConfigError(
            f"The model {path!r} is a {config.model_type}, of which transformers has no token classifier, and VERL's "
            'critic is one. Use algorithm.adv_estimator = "grpo", which needs no critic, or another model.'
        )


def _open(path: str, settings: VerlSettings, *, steps: int, device: torch.device) -> Any:
    critic = settings.critic
    # The body starts from the policy's weights, which already read the prompts; only the head starts at random.
    loaded = model_config(
        path,
        use_remove_padding=settings.is_packed,
        enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing,
    )
    config = loaded.hf_config
    check_family(config, path=path)
    # One label per token is the value. No dropout, which alone would make V differ from V_old.
    config.num_labels, config.classifier_dropout = 1, 0.0
    # The head maps the hidden state h_t to one number, V_t = w h_t, in place of the logits over the vocabulary.
    config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
    engine = engine_config(
        critic.fsdp,
        device=device,
        tokens=critic.ppo_max_token_len_per_gpu,
        rows=critic.ppo_micro_batch_size_per_gpu,
    )
    # Values are a view of the head's output; FSDP2 warns of in-place changes to it, and VERL makes no such changes.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDP\w+ForTokenClassification\) returned a view")
    with _quietly():
        worker = open_worker("value_model", loaded, engine=engine, optim=critic.optim, steps=steps)
    loss = verl_part("verl.workers.utils.losses:value_loss")
    # max of the clipped and the unclipped square: pessimistic, as in PPO's policy loss. Where V has left V_old +- eps_v
    # towards R, the clipped term is the larger one and has no gradient, so one update cannot follow a noisy R far.
    worker.set_loss_fn(partial(loss, config=critic_config(critic)))
    return worker


@contextmanager
def _quietly() -> Generator[None]:
    """Inside the block, hide transformers' report that the value head is new, which it is for every critic."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
