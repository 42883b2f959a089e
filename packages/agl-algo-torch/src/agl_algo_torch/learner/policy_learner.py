"""The model in training: opened from a published resource, updated, saved, restored and exported.

Algorithms share this module, so that the file of each contains only its own loop. Nothing here depends on the loss.
Everything here blocks; algorithms call it in a thread.
"""

from __future__ import annotations

import math
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.learner.batch import MicroBatch, RowSample, from_tokens, micro_batches, recompute_logprobs
from agl_algo_torch.learner.checkpoint import load_training, read_origin, save_served, save_training, served_weights
from agl_algo_torch.learner.model import (
    LoadedModel,
    add_lora,
    checkpoint_gradients,
    computing,
    load_model,
    open_adapter,
    refuse_tied_adapters,
    vision_tower,
)
from agl_algo_torch.learner.optim import apply_gradients, build_optimizer
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.scoring import bare, find_head, trunk
from agl_algo_torch.learner.typed_torch import seed_everything
from agl_objectives.directories import prune, step_directory
from agl_objectives.reports import Skipped
from agl_objectives.settings import Compute, Lora, Optim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from agl.contracts import AlgorithmContext
    from agl.schemas import Resource

__all__ = ["LearnerSettings", "PolicyLearner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The settings of a model in training.

    Attributes:
        optim: AdamW and its learning rate.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        total: Updates that the whole run plans, after which a decay of the learning rate is 0; 0 if it is unknown.
        per_step: Updates that one step plans; it may do fewer.
        has_critic: Whether the algorithm trains a critic as well, which takes memory.
    """

    optim: Optim
    lora: Lora = Lora()
    compute: Compute = Compute()
    total: int = 0
    per_step: int = 1
    has_critic: bool = False

    def __post_init__(self) -> None:
        if self.optim.decay != "constant" and self.total < 1:
            raise ConfigError(
                f"optim.decay = {self.optim.decay!r} falls to 0 at the last update of the run, and how many updates "
                "this algorithm makes is not known beforehand. Remove it."
            )
        if self.optim.trains_vision and self.lora.rank:
            raise ConfigError(
                f"optim.trains_vision is on and lora.rank = {self.lora.rank}, and adapters leave the vision tower as "
                "it is. Remove one of them."
            )


class PolicyLearner:
    """A model in training, with its AdamW optimizer and the number of updates done.

    Attributes:
        origin: The resource from which the model was loaded.
        updates: Number of updates done, skipped ones included.
        skipped: Counts the updates that were skipped since the model was loaded.
        checkpoints: Whether layers are computed again in the backward pass.
        notices: Sentences to show about optimisations that the model does not allow or that take time.
    """

    def __init__(self, *, origin: Weights, settings: LearnerSettings) -> None:
        """Load the model from `origin`; raises ConfigError if it cannot be loaded."""
        self.settings = settings
        self.origin = origin
        self.updates, self._planned = 0, 0
        self.skipped = Skipped(settings.optim.max_nonfinite)
        self.use_threads()
        self.loaded = _open(origin, settings)
        notices = [find_head(self.loaded.model), pack(self.loaded.model)]
        self.checkpoints, notice = _checkpoints(self.loaded, settings)
        self.notices = tuple(filter(None, [*notices, notice]))
        if self.checkpoints:
            checkpoint_gradients(self.loaded.model)
        self.optimizer = build_optimizer(self.loaded.model, settings.optim)

    @classmethod
    def resume(cls, source: Path, *, settings: LearnerSettings) -> PolicyLearner:
        """Load a checkpoint of `save`; on the same machine with as many threads, training continues bit for bit."""
        learner = cls(origin=read_origin(source), settings=settings)
        learner.load(source, is_checked=True)
        return learner

    def load(self, source: Path, *, is_checked: bool = False) -> None:
        """Continue from a checkpoint that `save` wrote with the same origin and settings; see `load_training`."""
        self.updates = load_training(source, model=self.loaded.model, optimizer=self.optimizer, is_checked=is_checked)

    def begin_step(self, step: int) -> None:
        """Put the decay of the learning rate where the plan has it after `step` steps, whatever updates they did."""
        self._planned = step * self.settings.per_step

    @property
    def left(self) -> float:
        """The share of the planned updates that is left, from 1 to 0."""
        return max(0.0, 1.0 - self._planned / self.settings.total) if self.settings.total else 1.0

    def use_threads(self) -> None:
        """Set torch's number of threads for the calling thread, if the settings give one; 1 suits tiny models best."""
        if self.settings.compute.threads:
            torch.set_num_threads(self.settings.compute.threads)

    def batches(
        self, samples: Sequence[RowSample], weight: Sequence[float], *, total: float = 1.0
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches of the samples, see `micro_batches`."""
        return micro_batches(
            samples,
            weight,
            total=total,
            token_budget=self.settings.compute.token_budget,
            device=self.loaded.device,
            is_packed=packs_rows(self.loaded.model),
        )

    def logprobs(self, samples: Sequence[RowSample], *, model: nn.Module | None = None) -> list[Tensor]:
        """Return the log-probabilities of the samples' trained tokens under `model`, by default the model in training.

        See `recompute_logprobs`.
        """
        self.use_threads()  # the setting belongs to the calling thread, and each call may come from another
        return recompute_logprobs(
            model or self.loaded.model,
            samples,
            token_budget=self.settings.compute.token_budget,
            device=self.loaded.device,
        )

    def apply(self, report: Mapping[str, float]) -> dict[str, float]:
        """Do one optimizer update with the accumulated gradient; returns `report` with `grad_norm` added.

        `grad_norm` is the 2-norm before clipping. If the gradient is not finite, the update is skipped: the weights
        stay, `updates` still counts it, and the result has the finite numbers of `report` and `updates_nonfinite`.
        Raises AglError if too many updates in a row are skipped.
        """
        norm = apply_gradients(self.optimizer, self.settings.optim, update=self.updates, left=self.left)
        is_skipped = self.skipped.note(norm, update=self.updates)
        self.updates += 1
        self._planned += 1
        if not is_skipped:
            return {**report, "grad_norm": norm}
        return {name: value for name, value in report.items() if math.isfinite(value)} | {"updates_nonfinite": 1.0}

    @property
    def moves(self) -> int:
        """Number of updates that changed the weights, without the skipped ones."""
        return self.updates - self.skipped.total

    def save(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write a training checkpoint and remove old ones, except the newest `keep` and those of the steps in `kept`.

        At least two stay, because the run's stored state names the previous checkpoint until the new state is stored.
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
        """Return the resource that names the weights of a step; their files need not exist yet."""
        return served_weights(self.loaded, step_directory(workdir.absolute() / "weights", step))

    def export(self, workdir: Path, *, step: int, keep: int, kept: Collection[int] = ()) -> Weights:
        """Write the weights of a step for serving, and return their resource; removes old ones as `save` does."""
        weights = save_served(self.loaded, step_directory(workdir.absolute() / "weights", step))
        prune(workdir / "weights", step=step, keep=max(2, keep), kept=kept)
        return weights


def saved_path(workdir: Path, step: int) -> str:
    """Return the path of the checkpoint that `PolicyLearner.save` writes for a step; `""` for step 0."""
    return str(step_directory(workdir.absolute() / "state", step)) if step else ""


def tuned_name(context: AlgorithmContext, *, algorithm: str) -> str:
    """Return the name of the resource that the algorithm tunes; raises ConfigError unless there is exactly one."""
    if len(context.tunes) != 1:
        raise ConfigError(
            f"{algorithm} trains the weights of one policy, but tunes {list(context.tunes)}. "
            'Give one name, such as tunes = "main_llm", and one [[algorithm]] per policy.'
        )
    return context.tunes[0]


def tuned_weights(resource: Resource, *, name: str) -> Weights:
    """Return the resource as `Weights`; raises ConfigError for others, such as an endpoint, which cannot train."""
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
    """Load weights for training: with a new adapter, with the published adapter, or with all weights trainable."""
    seed_everything(0)  # adapters start from the same random matrices on every start
    path = origin.uri if origin.format == "hf" else origin.base_model
    # Under LoRA the base is frozen and the adapters are float32 anyway; else the weights in training are a master.
    compute, has_lora = settings.compute, bool(settings.lora.rank)
    loaded = load_model(
        path,
        device=compute.device,
        dtype=compute.dtype,
        is_master=not has_lora,
        is_quantized=settings.lora.is_quantized,
    )
    if origin.format == "hf":
        model = add_lora(loaded.model, settings.lora) if has_lora else loaded.model
    else:
        model = open_adapter(loaded.model, origin.uri, settings=settings.lora)
    if has_lora:
        refuse_tied_adapters(model)
    elif not settings.optim.trains_vision and (tower := vision_tower(model)) is not None:
        tower.requires_grad_(requires_grad=False)
    return replace(loaded, model=model)


KEPT_SHARE = 0.5
"""The largest share of the memory left by weights, gradients, moments and the policy server that one pass may keep for
its gradient before layers are computed again. `agl check --forecast` uses the same share."""


def _checkpoints(loaded: LoadedModel, settings: LearnerSettings) -> tuple[bool, str]:
    """Return whether layers are computed again, and a notice if the learner decides this itself."""
    compute = settings.compute
    if compute.gradient_checkpointing != "auto":
        return compute.gradient_checkpointing, ""
    base: Any = bare(loaded.model)
    # Eager attention keeps the square of a row's length, which no measurement of short rows shows.
    is_eager = getattr(base.config, "_attn_implementation", "") == "eager"
    kept, room = kept_per_token(loaded) * compute.token_budget, _memory(loaded.device) - _held(loaded, settings)
    if not getattr(base, "supports_gradient_checkpointing", False) or not (is_eager or kept > KEPT_SHARE * room):
        return False, ""
    reason = "its attention keeps the square of a row's length"
    if not is_eager:
        reason = f"a pass of {compute.token_budget:,} tokens would keep {kept / 1e9:.3g} GB, with {room / 1e9:.3g} left"
    return True, (
        f"the layers of {loaded.name} are computed again in the backward pass, because {reason}. Updates take about a "
        "third longer; compute.gradient_checkpointing = false turns it off"
    )


def _held(loaded: LoadedModel, settings: LearnerSettings) -> float:
    """Return the bytes of weights, gradients, moments, critic and policy server."""
    model = loaded.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in model.parameters())  # 4 bits: two in a byte
    moments = 8.0 if settings.optim.moments == "float32" else 2 * (1 + 4 / 256)
    states = trained * (4 + moments + (4 + moments) * settings.has_critic)
    served = weights * (4 if settings.compute.dtype == "float32" else 2)
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + states + served


def _memory(device: torch.device) -> float:
    """Return the bytes of the device's memory, or the limit of the container if that is less."""
    if device.type == "cuda":
        return float(cast("Any", torch.cuda).get_device_properties(device).total_memory)
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(min(physical, int(text)) if text != "max" else physical)


def kept_per_token(loaded: LoadedModel) -> float:
    """Return the bytes that a pass through the layers keeps for its gradient per token; runs two short passes."""
    few, many = 8, 40
    return (_kept(loaded, many) - _kept(loaded, few)) / (many - few)


def _kept(loaded: LoadedModel, tokens: int) -> int:
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids_B_T = torch.zeros(1, tokens, dtype=torch.int64, device=loaded.device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), computing(loaded.model):
        hidden_B_T_H = trunk(loaded.model)(input_ids=ids_B_T, use_cache=False)
    del hidden_B_T_H  # its graph held the tensors until here, so no two of them had one address
    return sum(kept.values())


MEASURED_S = 5.0
"""Approximate limit, in seconds, on the duration of a measurement of updates."""

_FEW = 4


def update_seconds(
    update: Callable[[Sequence[RowSample]], object], rows: Sequence[tuple[int, int]], *, vocabulary: int
) -> float:
    """Return the seconds that `update` takes on `rows`, each given as (tokens, trained tokens).

    The cost depends only on the lengths of the rows, so rows of random tokens are measured. A first update of a few
    rows is not counted, because torch allocates memory and chooses kernels in it. The time of a second update of the
    same rows limits the number of rows that are measured; the time of all rows is then extrapolated by their tokens.
    `update` changes the weights, so the learner must not be used for training afterwards.
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
    """Return a row of random tokens; the last `trained` tokens train, with advantage 1 if `number` is odd, else -1."""
    draw = random.Random(number)
    size = max(2, tokens)  # a row's first token is never predicted
    answer = min(max(1, trained), size - 1)
    ids = [draw.randrange(vocabulary) for _ in range(size)]
    row = from_tokens(f"tried-{number}", ids, [0] * (size - answer) + [1] * answer)
    return replace(row, advantages=row.advantages * (1.0 if number % 2 else -1.0), behaviour=-row.advantages)
