"""The model in training: opened from a published resource, saved, restored and exported again.

The algorithms share it, so that each of them reads as its own loop. It decides nothing about losses.
Everything here blocks; algorithms call it in a thread.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.learner.batch import MicroBatch, RowSample, from_tokens, micro_batches, recompute_logprobs
from agl_algo_torch.learner.checkpoint import load_training, read_origin, save_served, save_training, served_weights
from agl_algo_torch.learner.model import (
    LoadedModel,
    add_lora,
    checkpoint_gradients,
    load_model,
    open_adapter,
    refuse_tied_adapters,
)
from agl_algo_torch.learner.optim import apply_gradients, build_optimizer
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.scoring import find_head
from agl_algo_torch.learner.typed_torch import seed_everything
from agl_objectives.directories import prune, step_directory
from agl_objectives.reports import Skipped
from agl_objectives.settings import Compute, Lora, Optim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from agl.contracts import AlgorithmContext
    from agl.schemas import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The settings of a model in training; `total` updates are those of the whole run, at which a decay ends."""

    optim: Optim
    lora: Lora = Lora()
    compute: Compute = Compute()
    total: int = 0

    def __post_init__(self) -> None:
        if self.optim.decay != "constant" and self.total < 1:
            raise ConfigError(
                f"optim.decay = {self.optim.decay!r} falls to 0 at the last update of the run, and how many updates "
                "this algorithm makes is not known beforehand. Remove it."
            )


class PolicyLearner:
    """A model, its AdamW and the number of updates done; `origin` is the resource that it was opened from.

    `skipped` counts the updates that were not made since then, and `notices` are sentences for people about what the
    model does not allow.
    """

    def __init__(self, *, origin: Weights, settings: LearnerSettings) -> None:
        """Load `origin`; raises ConfigError when it cannot be loaded."""
        self.settings = settings
        self.origin = origin
        self.updates = 0
        self.skipped = Skipped(settings.optim.max_nonfinite)
        self.use_threads()
        self.loaded = _open(origin, settings)
        if settings.compute.gradient_checkpointing:
            checkpoint_gradients(self.loaded.model)
        self.notices = tuple(filter(None, [find_head(self.loaded.model), pack(self.loaded.model)]))
        self.optimizer = build_optimizer(self.loaded.model, settings.optim)

    @classmethod
    def resume(cls, source: Path, *, settings: LearnerSettings) -> PolicyLearner:
        """Open the checkpoint that `save` wrote; continues bit for bit on the same machine and thread count."""
        learner = cls(origin=read_origin(source), settings=settings)
        learner.load(source)
        return learner

    def load(self, source: Path) -> None:
        """Continue from the checkpoint that `save` wrote for the same origin and settings."""
        self.updates = load_training(source, model=self.loaded.model, optimizer=self.optimizer)

    def use_threads(self) -> None:
        """Set torch to the configured number of threads in the calling thread; one is fastest for tiny models."""
        if self.settings.compute.threads:
            torch.set_num_threads(self.settings.compute.threads)

    def batches(
        self, samples: Sequence[RowSample], weight: Sequence[float], *, total: float = 1.0
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of rows, see `micro_batches`."""
        return micro_batches(
            samples,
            weight,
            total=total,
            token_budget=self.settings.compute.token_budget,
            device=self.loaded.device,
            is_packed=packs_rows(self.loaded.model),
        )

    def logprobs(self, samples: Sequence[RowSample], *, model: nn.Module | None = None) -> list[Tensor]:
        """Return the log-probabilities of trained tokens, see `recompute_logprobs`; of `model` if given."""
        self.use_threads()  # the setting belongs to the calling thread, and each call may come from another
        return recompute_logprobs(
            model or self.loaded.model,
            samples,
            token_budget=self.settings.compute.token_budget,
            device=self.loaded.device,
        )

    def apply(self, report: Mapping[str, float]) -> dict[str, float]:
        """Do one optimizer update with the accumulated gradient; returns `report` with the 2-norm before clipping.

        A gradient that is not finite is skipped: `updates` goes on, the weights stay, and the report has its finite
        numbers and `updates_nonfinite`. Raises AglError when too many in a row are not finite.
        """
        norm = apply_gradients(self.optimizer, self.settings.optim, update=self.updates, total=self.settings.total)
        is_skipped = self.skipped.note(norm, update=self.updates)
        self.updates += 1
        if not is_skipped:
            return {**report, "grad_norm": norm}
        return {name: value for name, value in report.items() if math.isfinite(value)} | {"updates_nonfinite": 1.0}

    @property
    def moves(self) -> int:
        """Updates since this learner was opened, or since the checkpoint's first one, that changed the weights."""
        return self.updates - self.skipped.total

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write a training checkpoint and remove all but the newest `keep`, the last two and those of `kept`.

        The run's state names the one before until the new state is saved.
        """
        save_training(
            step_directory(workdir / "state", step),
            model=self.loaded.model,
            optimizer=self.optimizer,
            updates=self.updates,
            origin=self.origin,
        )
        prune(workdir / "state", step=step, keep=max(2, keep), kept=kept)

    def served(self, workdir: Path, *, step: int) -> Weights:
        """Return the resource that names the weights to serve of a step, which need not be written yet."""
        return served_weights(self.loaded, step_directory(workdir.absolute() / "weights", step))

    def export(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> Weights:
        """Write the weights to serve and return the resource that names them; prunes like `save`."""
        weights = save_served(self.loaded, step_directory(workdir.absolute() / "weights", step))
        prune(workdir / "weights", step=step, keep=max(2, keep), kept=kept)
        return weights


def saved_path(workdir: Path, step: int) -> str:
    """Return the path that `PolicyLearner.save` wrote for a step, `""` before the first."""
    return str(step_directory(workdir.absolute() / "state", step)) if step else ""


def tuned_name(context: AlgorithmContext, *, algorithm: str) -> str:
    """Return the one resource that the algorithm tunes; raises ConfigError unless there is exactly one."""
    if len(context.tunes) != 1:
        raise ConfigError(
            f"{algorithm} trains the weights of one policy, but tunes {list(context.tunes)}. "
            'Give one name, such as tunes = "main_llm", and one [[algorithm]] per policy.'
        )
    return context.tunes[0]


def tuned_weights(resource: Resource, *, name: str) -> Weights:
    """Return the resource as weights; raises ConfigError for an endpoint, whose weights cannot be reached."""
    if not isinstance(resource, Weights):
        raise ConfigError(
            f"The policy {name!r} is a {type(resource).__name__}, whose weights cannot be trained from here. "
            f'Serve it in this process: [policy.{name}] use = "torch".'
        )
    return resource


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0.0 without values."""
    return sum(values) / len(values) if values else 0.0


def _open(origin: Weights, settings: LearnerSettings) -> LoadedModel:
    """Load the weights as the settings ask: with a new adapter, with the published one, or all of them to train."""
    seed_everything(0)  # adapters start from the same random matrices on every start
    path = origin.uri if origin.format == "hf" else origin.base_model
    # Under LoRA the base is frozen and the adapters are float32 anyway; else the weights in training are a master.
    compute, has_lora = settings.compute, bool(settings.lora.rank)
    loaded = load_model(path, device=compute.device, dtype=compute.dtype, is_master=not has_lora)
    if origin.format == "hf":
        model = add_lora(loaded.model, settings.lora) if has_lora else loaded.model
    else:
        model = open_adapter(loaded.model, origin.uri, settings=settings.lora)
    if has_lora:
        refuse_tied_adapters(model)
    return replace(loaded, model=model)


MEASURED_S = 5.0
"""Seconds that the measurement of an update may take, about."""

_FEW = 4


def update_seconds(
    update: Callable[[Sequence[RowSample]], object], rows: Sequence[tuple[int, int]], *, vocabulary: int
) -> float:
    """Return the seconds of `update` on rows of so many tokens, of which so many train.

    The cost follows from the lengths of rows and from nothing that they say, so random rows can be tried out. A first
    update of a few rows is not counted: torch allocates and chooses kernels in it. The time of the next one says how
    many rows can be tried; where that is not all of them, the seconds of the others follow from their tokens.
    The weights move, so the learner must be one that is dropped afterwards.
    """
    made = [random_row(number, tokens, trained, vocabulary) for number, (tokens, trained) in enumerate(rows)]

    def timed(rows: Sequence[RowSample]) -> float:
        started = time.perf_counter()
        update(rows)
        return time.perf_counter() - started

    timed(made[:_FEW])
    few = timed(made[:_FEW])
    tried = made[: max(_FEW, min(len(made), round(_FEW * MEASURED_S / max(few, 1e-9))))]
    seconds = few if len(tried) <= _FEW else min(timed(tried) for _ in range(1 + (few * len(tried) < 1)))
    return seconds * sum(len(row.ids) for row in made) / sum(len(row.ids) for row in tried)


def random_row(number: int, tokens: int, trained: int, vocabulary: int) -> RowSample:
    """Return a row of random tokens, the last of which train, with advantages of both signs."""
    draw = random.Random(number)
    size = max(2, tokens)  # a row's first token is never predicted
    answer = min(max(1, trained), size - 1)
    ids = [draw.randrange(vocabulary) for _ in range(size)]
    row = from_tokens(f"tried-{number}", ids, [0] * (size - answer) + [1] * answer)
    return replace(row, advantages=row.advantages * (1.0 if number % 2 else -1.0), behaviour=-row.advantages)
