"""VERL's training worker in this process: opened from published weights, updated, saved, and exported again.

The worker is VERL's `TrainingWorker` with its FSDP2 engine and `ppo_loss`; `models.py` describes the loss, and nothing
here computes one. All methods block; the algorithm calls them in a thread.

Files: a training checkpoint is VERL's own (sharded model, optimizer, scheduler and random state, which torch pickles,
so load only your own). Published weights are a Hugging Face directory, or a peft adapter that names its base. Every
directory is written in full or not at all.

R is the length of a response.
"""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_verl.local.models import open_policy
from agl_algo_verl.losses.choice import chosen_loss, needs_entropies
from agl_algo_verl.losses.metrics import plain_metrics
from agl_algo_verl.privates import schedule_of, tensors_of, use_rate_of_schedule, with_own_settings
from agl_algo_verl.rows.batches import micro_batched, per_rollout, responses, weighting
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.runtime import prepare
from agl_algo_verl.weights.adapters import adapter_of, write_adapter
from agl_algo_verl.weights.probe import put_probe
from agl_objectives.directories import damage, prune, step_directory, write_directory

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from agl_algo_verl.settings.settings import VerlSettings
    from agl_objectives.adapters import HeldAdapter

ORIGIN = "origin.json"
"""The file in a checkpoint that names the weights from which the model was loaded."""


class VerlWorker:
    """One model in training.

    Args:
        origin: Weights in Hugging Face's format.
        settings: VERL's configuration.
        steps: Steps of the whole run, for the schedule of the learning rate.

    Raises:
        ConfigError: VERL is not usable here, or cannot train these weights.
    """

    def __init__(self, *, origin: Weights, settings: VerlSettings, steps: int) -> None:
        self.origin = origin
        self._settings = settings
        self.use_threads()
        self.device = prepare()
        check_device(settings, self.device)
        self._reference: Any = None
        self._worker = open_policy(origin.uri, settings, role="actor", steps=steps, device=self.device)

    @classmethod
    def resume(cls, source: Path, *, settings: VerlSettings, steps: int) -> VerlWorker:
        """Load a checkpoint of `save`: weights, moments, schedule position and random state.

        Learning rate, betas and weight decay come from the settings.
        """
        if problem := damage(source, state=ORIGIN):
            raise ConfigError(
                f"There is no whole training checkpoint in {source}: {problem}. "
                "Resume where the run's files are, or start the run under a new name."
            )
        worker = cls(origin=Weights(uri=_origin_in(source)), settings=settings, steps=steps)
        with with_own_settings(worker._worker.engine):
            worker._worker.load_checkpoint(str(source), del_local_after_load=False)
        return worker

    def use_threads(self) -> None:
        """Set torch's number of threads for the calling thread, if the settings give one; 1 suits tiny models best."""
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)

    def scores(
        self, samples: Sequence[RowSample], *, has_entropy: bool = True
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Return the engine's log-probabilities and entropies of each sample's response, [R] per sample on the CPU.

        Without `has_entropy` each sample's entropy is None.
        """
        self.use_threads()
        if not has_entropy or not samples:
            return self._infer(self._worker, samples), [None] * len(samples)
        found = self._answer(self._worker, samples, calculate_entropy=True)
        return responses(found["log_probs"], samples), responses(found["entropy"], samples)

    def reference_logprobs(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return the log-probabilities under the weights from which the model was loaded, [R] per sample on the CPU.

        With adapters these are the current weights without the adapters; otherwise the first call loads a second model.
        """
        self.use_threads()
        if self._settings.is_lora:
            return self._infer(self._worker, samples, no_lora_adapter=True)
        if self._reference is None:
            self._reference = open_policy(
                self.origin.uri, self._settings, role="reference", steps=1, device=self.device
            )
        return self._infer(self._reference, samples)

    def update(
        self, samples: Sequence[RowSample], *, rollouts: int, is_last: bool, held: Sequence[RowSample] = ()
    ) -> dict[str, float]:
        """Do one optimizer update on the rows of `rollouts` rollouts; returns the metrics to log.

        `is_last` marks the last update of a step, after which the learning-rate schedule advances. `held` are the rows
        of `losses/anchor.py`, with the reference's log-probabilities.
        """
        self.use_threads()
        actor = self._settings.actor
        choice = chosen_loss(self._settings)
        if choice is None and actor.loss_agg_mode == "seq-mean-token-mean":
            samples = per_rollout(samples)  # a mean over each rollout's tokens, where VERL takes one over each row's
        options: dict[str, Any] = {
            # The divisor of VERL's means over sequences. VERL's sequences are rows; here it is the number of rollouts,
            # so that a rollout weighs the same in one row as in ten.
            "global_batch_size": rollouts,
            "update_lr_scheduler": is_last,
            "calculate_entropy": needs_entropies(self._settings),  # a softmax over the vocabulary
            "weighting": None if choice is None else weighting(samples, rollouts=rollouts, choice=choice),
        }
        if held:
            options["agl_anchor_coef"] = self._settings.anchor_coef
        return plain_metrics(self._worker.train_batch(self._batch([*samples, *held], **options))["metrics"])

    @property
    def place(self) -> int:
        """The position in the learning-rate schedule: the number of completed steps."""
        return int(schedule_of(self._worker.engine).last_epoch)

    def move_schedule(self) -> None:
        """Advance the learning-rate schedule for a step without an update."""
        with warnings.catch_warnings():  # torch expects an update before each move, and the first step had none
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)`")
            self._worker.engine.lr_scheduler_step()

    def use_rate(self, rate: float, *, place: int | None = None) -> None:
        """Use `rate` times the configured learning rate; with `place`, move the schedule to that position."""
        use_rate_of_schedule(self._worker.engine, peak=rate * self._settings.actor.optim.lr, place=place)

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write a training checkpoint; removes old ones, except the last `keep` (at least two) and those in `kept`.

        The previous checkpoint stays because the run's state names it until the new state is saved.
        """

        def fill(directory: Path) -> None:
            self._worker.save_checkpoint(str(directory), global_step=step)
            (directory / ORIGIN).write_text(json.dumps({"uri": self.origin.uri}), encoding="utf-8")

        write_directory(step_directory(workdir / "state", step), fill)
        prune(workdir / "state", step=step, keep=max(2, keep), kept=kept)

    def export(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> Weights:
        """Write the weights to serve, or the adapter, and return the resource that names them.

        A probe in the same directory (`weights/probe.py`) lets a policy check that it serves these weights.
        """
        weights = self.served(workdir, step=step)
        write_directory(Path(weights.uri), self._write_weights)
        prune(workdir / "weights", step=step, keep=max(2, keep), kept=kept)
        return weights

    def served(self, workdir: Path, *, step: int) -> Weights:
        """Return the resource that names the files of `export`."""
        place = str(step_directory(workdir.absolute() / "weights", step))
        if self._settings.is_lora:
            return Weights(uri=place, base_model=self.origin.uri, format="lora")
        return Weights(uri=place, format="hf")

    def held(self) -> dict[str, Tensor] | HeldAdapter:
        """Return the current weights by tensor name, on the CPU, with tied weights once; or the adapter."""
        engine = self._worker.engine
        if self._settings.is_lora:
            return adapter_of(engine.module, base=self.origin.uri, whole=_gathered)
        state = {name: tensor.detach().cpu() for name, tensor in tensors_of(engine)}
        if engine.model_config.hf_config.tie_word_embeddings:
            state.pop("lm_head.weight", None)  # the same tensor as the embedding
        return state

    def _write_weights(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        engine, held = self._worker.engine, self.held()
        if isinstance(held, dict):
            # transformers saves through a model object; on the meta device it has shapes but takes no memory.
            with torch.device("meta"):
                shell = cast("Any", AutoModelForCausalLM).from_config(engine.model_config.hf_config)
            with no_progress_bars():
                shell.save_pretrained(directory, state_dict=held)
        else:
            write_adapter(directory, engine.module, held)
        engine.model_config.tokenizer.save_pretrained(directory)
        put_probe(directory, engine.model_config.tokenizer, self._score_tokens)

    def _score_tokens(self, token_ids: Sequence[int]) -> list[float]:
        """Return the engine's log-probabilities of all tokens but the first, [N - 1] for N tokens."""
        others = torch.ones(len(token_ids) - 1)  # [R]: a row whose prompt is its first token
        row = RowSample(
            rollout="probe",
            group=0,
            ids=torch.tensor(token_ids),
            mask=others.bool(),
            advantages=torch.zeros_like(others),
            behaviour=torch.zeros_like(others),
            temperature=1.0,  # log-probabilities of the model itself, as every reader of a probe expects
        )
        return [float(value) for value in self._infer(self._worker, [row])[0]]

    def _infer(self, worker: Any, samples: Sequence[RowSample], **options: Any) -> list[Tensor]:
        if not samples:
            return []
        return responses(self._answer(worker, samples, calculate_entropy=False, **options)["log_probs"], samples)

    def _answer(self, worker: Any, samples: Sequence[RowSample], **options: Any) -> Any:
        """Return the result of VERL's forward pass over the rows, without a loss."""
        return worker.infer_batch(self._batch(samples, compute_loss=False, **options))

    def _batch(self, samples: Sequence[RowSample], **options: Any) -> TensorDict:
        actor = self._settings.actor
        rows, tokens = actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu
        return micro_batched(samples, rows=rows, tokens=tokens, device=self.device, **options)


def origins(workdir: Path) -> list[str]:
    """Return the weights from which the models of the checkpoints in `workdir` were loaded."""
    return [_origin_in(file.parent) for file in (workdir / "state").glob(f"[0-9]*/{ORIGIN}")]


def _origin_in(checkpoint: Path) -> str:
    return json.loads((checkpoint / ORIGIN).read_text(encoding="utf-8"))["uri"]


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Inside the block, switch off transformers' progress bars; the experiment draws its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_device(settings: VerlSettings, device: torch.device) -> None:
    """Raise ConfigError for settings that this machine cannot run."""
    if device.type == "cuda":
        return
    parts = {"actor_rollout_ref.actor.fsdp_config": settings.actor.fsdp_config, "critic.fsdp": settings.critic.fsdp}
    asked = {"actor_rollout_ref.model.use_remove_padding": settings.is_packed}
    for name, fsdp in parts.items():
        asked[f"{name}.param_offload"] = fsdp.param_offload
        asked[f"{name}.optimizer_offload"] = fsdp.optimizer_offload
        asked[f"{name}.mixed_precision.param_dtype"] = fsdp.mixed_precision.param_dtype == "fp16"
    wrong = [name for name, is_asked in asked.items() if is_asked]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} need a GPU, and this machine has none that torch can use. "
            "Remove them here, or run the experiment where a GPU is."
        )


def _gathered(tensor: Any) -> Tensor:
    """Return the whole tensor on the CPU, even if FSDP2 has divided it between ranks (a DTensor)."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()
