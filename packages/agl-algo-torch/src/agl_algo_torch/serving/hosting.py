"""One base model for many adapters, which other programs train and sample from by single requests.

The algorithms of this distribution run a whole training loop. A training server runs none: its clients request a
gradient for some rows, then an update, then samples, and several clients do so at once. `HostedModel` loads the base
once. Each `Trainee` has its own adapters and moments, each `Sampler` a snapshot of adapters and an engine, and all of
them share the same frozen weights.

The caller gives the loss as a function of log-probabilities. Nothing here depends on a wire format.
N is the number of tokens of all rows of one call.
"""

from __future__ import annotations

import copy
import json
import math
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from agl.errors import AglError, ConfigError
from agl.schemas import Weights
from agl_algo_torch.learner.batch import MicroBatch, row_chunks
from agl_algo_torch.learner.checkpoint import load_training, save_training
from agl_algo_torch.learner.model import add_lora, load_model, no_bars
from agl_algo_torch.learner.optim import build_optimizer
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.scoring import find_head
from agl_algo_torch.learner.typed_torch import backward, modules, numbers, seed_everything, split_sizes
from agl_algo_torch.serving.codec import TextCodec, stop_checker
from agl_algo_torch.serving.engine import Engine, EngineSettings
from agl_algo_torch.serving.sampling import SamplingParams
from agl_algo_torch.serving.sequence import EngineError, Event, Generation, GenerationRequest
from agl_objectives.directories import write_directory
from agl_objectives.settings import Lora, Optim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    TokenLoss = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]
    """`loss(logp_N, inputs, row_N)` returns the loss of every token, [N]. The arguments, [N] each, are the tokens'
    log-probabilities in nats, the inputs of `TargetRow` by name, and the indices of the tokens' rows."""

__all__ = [
    "AdamStep",
    "Adapter",
    "HostedModel",
    "Sample",
    "SampleRequest",
    "Sampler",
    "TargetRow",
    "Trainee",
    "read_adapter",
]

_ADAPTER = "adapter.json"
_TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The low-rank adapters to add to a model's linear layers.

    Attributes:
        rank: Rank of the matrices.
        alpha: The product of the matrices is scaled by alpha / rank.
        attention: Whether linear layers of attention have adapters.
        mlp: Whether all other linear layers, except for the output layer, have adapters.
        head: Whether the output layer has an adapter.
        seed: Seed of the random initial matrices.
    """

    rank: int
    alpha: float = 32.0
    attention: bool = True
    mlp: bool = True
    head: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One row to train on: the model predicts `targets[t]` from `ids[:t + 1]`. All sequences have the same length.

    Attributes:
        ids: Ids of the tokens that the model reads.
        targets: Id of the token to predict at every position.
        inputs: Further inputs of the loss, by name, with one number for every position.
    """

    ids: Sequence[int]
    targets: Sequence[int]
    inputs: Mapping[str, Sequence[float]] = field(default_factory=dict[str, "Sequence[float]"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """The parameters of one update of AdamW; with a `max_grad_norm` of 0 the gradient is not clipped."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for continuations of one prompt.

    Attributes:
        prompt_ids: Ids of the prompt's tokens.
        count: Number of continuations.
        max_tokens: Largest number of tokens of each continuation.
        temperature: Sampling temperature; 0 is greedy decoding.
        top_p: Keeps the smallest set of likeliest tokens with this probability; 1 keeps all.
        top_k: Keeps this number of likeliest tokens; 0 keeps all.
        seed: Seed of the first continuation; each further one has a seed higher by 1. None for seeds of the engine.
        stop_ids: Tokens that end a continuation.
        stop_texts: Texts that end a continuation.
        top_logprobs: Number of alternatives to report per token.
    """

    prompt_ids: tuple[int, ...]
    count: int = 1
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        ids: Ids of the tokens, including the stop token.
        logprobs: Log-probability of each token, in nats.
        tops: The alternatives to each token as (id, logprob).
        is_cut: Whether the limit of tokens ended the continuation.
    """

    ids: list[int]
    logprobs: list[float]
    tops: list[tuple[tuple[int, float], ...]]
    is_cut: bool


class HostedModel:
    """A frozen base model that several trainees and samplers share.

    Args:
        path: Directory or hub name.
        device: `auto`, `cpu`, `cuda` ...
        dtype: `float32` or `bfloat16`; adapters are float32 in any case.
        token_budget: Largest number of tokens that one forward pass of a trainee computes.

    Raises:
        ConfigError: The model cannot be loaded.
    """

    def __init__(self, path: str, *, device: str = "cpu", dtype: str = "float32", token_budget: int = 16_384) -> None:
        self._loaded = load_model(path, device=device, dtype=dtype)
        self._loaded.model.requires_grad_(requires_grad=False)
        self._token_budget = token_budget
        self._codec = TextCodec(self._loaded.tokenizer, stop_ids=self._loaded.stop_ids)

    @property
    def path(self) -> str:
        """The directory or hub name from which the model was loaded."""
        return self._loaded.name

    @property
    def context_length(self) -> int:
        """Largest number of tokens of a prompt and its continuation together."""
        return self._loaded.context_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which start at 0."""
        return int(cast("Any", self._loaded.model).config.get_text_config().vocab_size)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids of the tokens with which the model ends an answer, for `SampleRequest.stop_ids`."""
        return self._codec.stop_ids

    def trainee(self, adapter: Adapter) -> Trainee:
        """Return a trainee with new adapters; raises ConfigError if `adapter` selects no layer."""
        settings = Lora(rank=adapter.rank, alpha=adapter.alpha, targets=self._targets(adapter))
        seed_everything(adapter.seed)
        return self._trainee(add_lora(self._bare(), settings), adapter)

    def restored(self, folder: Path, *, moments: bool) -> Trainee:
        """Return a trainee that continues from a folder of `Trainee.save`; without `moments`, with new AdamW moments.

        Raises ConfigError if the folder is absent or belongs to another model.
        """
        trainee = self.trainee(read_adapter(folder))
        trainee.load(folder, moments=moments)
        return trainee

    def sampler(self, folder: Path | None = None, *, settings: EngineSettings | None = None) -> Sampler:
        """Return a started sampler with the adapters that `Trainee.save_adapter` wrote; with None, of the base
        alone.
        """
        model = self._bare()
        if folder is not None:
            from peft import PeftModel

            read_adapter(folder)
            with no_bars():
                model = cast("Any", PeftModel).from_pretrained(model, folder).get_base_model()
        return Sampler(model.requires_grad_(requires_grad=False), codec=self._codec, settings=settings)

    def _trainee(self, model: nn.Module, adapter: Adapter) -> Trainee:
        find_head(model)
        pack(model)
        return Trainee(model, adapter=adapter, origin=self.path, token_budget=self._token_budget)

    def _bare(self) -> nn.Module:
        """Return a copy of the base model that shares its parameters; adapters on the copy leave the base as it is."""
        shared = {id(parameter): parameter for parameter in self._loaded.model.parameters()}
        return copy.deepcopy(self._loaded.model, cast("dict[int, Any]", shared))

    def _targets(self, adapter: Adapter) -> tuple[str, ...]:
        model = cast("Any", self._loaded.model)
        head = model.get_output_embeddings()
        wanted: list[str] = []
        for name, module in modules(model):
            if not isinstance(module, nn.Linear):
                continue
            is_attention = any(part in ("self_attn", "attn", "attention", "self_attention") for part in name.split("."))
            if adapter.head if module is head else adapter.attention if is_attention else adapter.mlp:
                wanted.append(name)
        if not wanted:
            raise ConfigError(
                f"The model {self.path!r} has no linear layers of the groups that should have adapters; train its "
                "attention, its MLP or its output layer."
            )
        return tuple(wanted)


class Trainee:
    """A set of adapters in training. Only one caller may use it at a time."""

    def __init__(self, model: nn.Module, *, adapter: Adapter, origin: str, token_budget: int) -> None:
        self.adapter = adapter
        self.updates = 0
        self._model, self._origin, self._token_budget = model, origin, token_budget
        self._optimizer = build_optimizer(model, Optim(lr=1.0))

    def run(self, rows: Sequence[TargetRow], loss: TokenLoss, *, has_gradient: bool) -> tuple[float, list[list[float]]]:
        """Return the sum of the loss over all tokens, and the log-probabilities of each row's targets, in nats.

        With `has_gradient`, the gradient of the sum is added to that of earlier calls, and an error discards the whole
        gradient since the last update. Raises AglError if the loss is not finite.
        """
        try:
            return self._passes(rows, loss, has_gradient=has_gradient)
        except BaseException:
            if has_gradient:  # the passes before the error have added only a part of the gradient
                self._optimizer.zero_grad(set_to_none=True)
            raise

    def _passes(
        self, rows: Sequence[TargetRow], loss: TokenLoss, *, has_gradient: bool
    ) -> tuple[float, list[list[float]]]:
        total, found = 0.0, dict[int, list[float]]()
        with torch.set_grad_enabled(has_gradient):
            lengths, is_packed = [len(row.ids) for row in rows], packs_rows(self._model)
            for places in row_chunks(lengths, token_budget=self._token_budget, is_packed=is_packed):
                batch = self._batch(rows, places)
                logp_N, value = self._loss(batch, rows, loss)
                total += _finite(float(value.detach()), has_gradient=has_gradient)
                if has_gradient:
                    backward(value)
                parts = split_sizes(logp_N.detach().cpu(), batch.lengths)
                found |= {place: numbers(part) for place, part in zip(batch.rows, parts, strict=True)}
        return total, [found[place] for place in range(len(rows))]

    def step(self, settings: AdamStep) -> float:
        """Do one update with the accumulated gradient and clear the gradient; returns its 2-norm before clipping.

        Raises AglError if the gradient is not finite; the gradient is then cleared, and nothing else changes.
        """
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm or math.inf))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps)
                group["weight_decay"] = settings.weight_decay
            self._optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise AglError(f"The 2-norm of the gradient is {norm}, so no update was made. Lower the learning rate.")
        return norm

    def save(self, folder: Path) -> None:
        """Write a state to continue training from; an existing folder is replaced as a whole."""

        def fill(place: Path) -> None:
            save_training(
                place / _TRAINING,
                model=self._model,
                optimizer=self._optimizer,
                updates=self.updates,
                origin=Weights(uri=self._origin),
            )
            _write_adapter(place, self.adapter)

        write_directory(folder, fill)

    def load(self, folder: Path, *, moments: bool) -> None:
        """Continue from a folder of `save`; without `moments`, with new AdamW moments. Any gradient is discarded."""
        self.updates = load_training(folder / _TRAINING, model=self._model, optimizer=self._optimizer)
        if not moments:
            self._optimizer.state.clear()

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters in peft's format for samplers and other programs; an existing folder is replaced."""

        def fill(place: Path) -> None:
            with no_bars():
                cast("Any", self._model).save_pretrained(place, save_embedding_layers=False)
            _write_adapter(place, self.adapter)

        write_directory(folder, fill)

    def _loss(self, batch: MicroBatch, rows: Sequence[TargetRow], loss: TokenLoss) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of a batch's targets, [N], and the summed loss, a scalar."""
        logp_N = batch.logprobs(self._model)
        chosen = [rows[place] for place in batch.rows]
        inputs = {
            name: torch.tensor([value for row in chosen for value in row.inputs[name]], device=logp_N.device)
            for name in chosen[0].inputs
        }
        return logp_N, loss(logp_N, inputs, batch.row_M).sum()

    def _batch(self, rows: Sequence[TargetRow], places: Sequence[int]) -> MicroBatch:
        """Return a micro-batch of the rows at `places`, in which every position predicts a target."""
        device = next(self._model.parameters()).device
        chosen = [rows[place] for place in places]
        lengths = tuple(len(row.ids) for row in chosen)
        ids_N = torch.tensor([i for row in chosen for i in row.ids], dtype=torch.int64, device=device)
        zeros_N = torch.zeros(len(ids_N), device=device)
        row_N = torch.tensor(places, device=device).repeat_interleave(torch.tensor(lengths, device=device))
        return MicroBatch(
            ids_N=ids_N,
            predicts_N=torch.ones(len(ids_N), dtype=torch.bool, device=device),
            lengths=lengths,
            is_packed=packs_rows(self._model),
            targets_M=torch.tensor([i for row in chosen for i in row.targets], dtype=torch.int64, device=device),
            advantages_M=zeros_N,
            behaviour_M=zeros_N,
            temperature_M=torch.ones(len(ids_N), device=device),
            weight_M=torch.ones(len(ids_N), device=device),
            row_M=row_N,
            rollout_M=row_N,
            rows=tuple(places),
        )


class Sampler:
    """Samples from a snapshot of weights; any thread may call the methods. Call `close` at the end."""

    def __init__(self, model: nn.Module, *, codec: TextCodec, settings: EngineSettings | None) -> None:
        self._engine, self._codec = Engine(model, settings=settings), codec
        self._engine.start()

    def sample(self, request: SampleRequest) -> Future[list[Sample]]:
        """Return a future of `request.count` continuations.

        The future raises EngineError (a PolicyError) if generation fails; cancel it to stop the continuations that run.
        Raises PromptError, QueueFullError or EngineStoppedError.
        """
        gathered = _Gathered(request.count)
        check = stop_checker(self._codec, request.stop_texts)
        wanted = [
            GenerationRequest(
                prompt_ids=request.prompt_ids,
                max_tokens=request.max_tokens,
                params=SamplingParams(
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    seed=None if request.seed is None else request.seed + place,
                    top_logprobs=request.top_logprobs,
                ),
                stop_ids=request.stop_ids,
                stop_check=check,
            )
            for place in range(request.count)
        ]
        flights = self._engine.submit(wanted, listeners=[gathered.listener(place) for place in range(request.count)])
        gathered.done.add_done_callback(lambda done: self._engine.cancel(flights) if done.cancelled() else None)
        return gathered.done

    def score(self, ids: Sequence[int]) -> Future[list[float]]:
        """Return a future of the log-probabilities of all tokens but the first, at temperature 1, in nats."""
        return self._engine.score(ids)

    def close(self) -> None:
        """Stop the engine; requests that still run end with an error. Idempotent."""
        self._engine.stop()


class _Gathered:
    """Collects the continuations of one request; the future `done` completes with the last one."""

    def __init__(self, count: int) -> None:
        self.done = Future[list[Sample]]()
        self._found: list[Sample | None] = [None] * count
        self._left = count

    def listener(self, place: int) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            if self.done.done():  # the caller has cancelled, or another continuation has failed
                return
            with suppress(InvalidStateError):  # another thread has just cancelled
                if isinstance(event, EngineError):
                    self.done.set_exception(event)
                elif isinstance(event, Generation):
                    self._found[place] = _sample(event)
                    self._left -= 1
                    if not self._left:
                        self.done.set_result([one for one in self._found if one is not None])

        return take


def read_adapter(folder: Path) -> Adapter:
    """Return the description of the adapters in a folder; raises ConfigError if the folder holds none."""
    path = folder / _ADAPTER
    if not path.is_file():
        raise ConfigError(f"There are no adapters in {folder}: {_ADAPTER} is missing. Name a folder that was saved.")
    return Adapter(**json.loads(path.read_text(encoding="utf-8")))


def _finite(value: float, *, has_gradient: bool) -> float:
    if not math.isfinite(value):
        raise AglError(
            f"The loss is {value}{'; the gradient since the last update is discarded' if has_gradient else ''}. Look "
            "for weights, advantages or log-probabilities that are not finite, or lower the learning rate."
        )
    return value


def _write_adapter(folder: Path, adapter: Adapter) -> None:
    (folder / _ADAPTER).write_text(json.dumps(asdict(adapter)), encoding="utf-8")


def _sample(generation: Generation) -> Sample:
    return Sample(
        ids=generation.token_ids,
        logprobs=[draw.logprob for draw in generation.draws],
        tops=[draw.top for draw in generation.draws],
        is_cut=generation.finish_reason == "length",
    )
