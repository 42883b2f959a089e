"""Supervised fine-tuning on dialogues: teaches a model the format and the skill before rewards can teach the rest.

Objective: minimise `-sum_t w_t log pi(y_t | y_<t)` over assistant tokens, one update per batch of dialogues.

    aggregation "token"     w = 1 / assistant tokens of the batch: the usual cross-entropy
    aggregation "sequence"  w = 1 / (tokens of the dialogue * dialogues): long dialogues count no more than short

There is no paper to deviate from. Two things differ from common practice. A template that re-renders earlier turns
gives several rows per dialogue, and these share the dialogue's weight. Batches are cut from a fixed order
(`is_shuffled = false`) or from a shuffle per epoch that follows from seed and epoch, so a resumed run sees the same.

One step of the algorithm is `updates_per_step` optimizer updates; weights are published after the last one.
Reading and tokenising dialogues is left to `dialogues`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.dialogues import read_dialogues, tokenize
from agl_algo_torch.learner.batch import loss_weights, micro_batches
from agl_algo_torch.learner.model import LoraSettings
from agl_algo_torch.learner.optim import Decay, OptimSettings
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import (
    LearnerSettings,
    PolicyLearner,
    mean,
    saved_path,
    tuned_name,
    tuned_weights,
)
from agl_algo_torch.learner.tuned_policy import at_least_one, not_negative, one_of
from agl_algo_torch.learner.typed_torch import backward, seeded
from agl_objectives.aggregation import MEANS, MeanAggregation
from agl_objectives.saving import SAVE_EVERY, SaveInterval, begin_saving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json
    from agl_algo_torch.data.dialogues import Dialogue
    from agl_algo_torch.learner.batch import RowSample


class SFT:
    """Fine-tunes the weights of one policy on the dialogues in a JSON-lines file.

    Args:
        data: File of `{"messages": [...], "tools": [...]}` lines, relative to the experiment's file.
        updates: Optimizer updates in all; 0 means one pass over the data.
        batch_size: Dialogues per update.
        updates_per_step: Updates between two saved states.
        is_shuffled: Whether every epoch has its own order; else the file's order.
        aggregation: `token`: every token counts the same; `sequence`: every dialogue does, however long.
        lr: Peak learning rate; `warmup` and `decay` shape it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
        max_nonfinite: Updates in a row that are skipped for a gradient that is not finite; one more ends the run.
        token_budget: Tokens that one forward pass may compute, padding included where rows are padded.
        lora_rank: 0 trains all weights; else the rank of LoRA adapters on `lora_targets` with `lora_alpha`.
        device: `auto`, `cpu`, `cuda` ...; `dtype` that of passes and exports; `threads` 0 leaves torch's.
        gradient_checkpointing: Whether layers are computed again in the backward pass, which takes less memory and
            a third more time.
        keep: Saved states and exported weights that stay on disk.
        save_every: Steps between two saves of weights and moments, a time such as `"60s"`, or the largest share of the
            time that may go into saving. A run that is killed repeats the steps since the last save.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        data: str,
        updates: int = 0,
        batch_size: int = 16,
        updates_per_step: int = 10,
        is_shuffled: bool = True,
        aggregation: MeanAggregation = "token",
        lr: float = 1e-5,
        warmup: int = 0,
        decay: Decay = "linear",  # to 0: a constant rate leaves the noise of the last batches in the weights
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_nonfinite: int = 3,
        token_budget: int = 16_384,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_targets: tuple[str, ...] = ("all-linear",),
        device: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        gradient_checkpointing: bool = False,
        keep: int = 2,
        save_every: int | str = SAVE_EVERY,
    ) -> None:
        if min(batch_size, updates_per_step, keep) < 1 or updates < 0:
            raise ConfigError(
                f"sft got {batch_size=}, {updates_per_step=}, {keep=} and {updates=}; "
                "the first three must be at least 1, updates at least 0."
            )
        one_of("sft", aggregation=(aggregation, MEANS), decay=(decay, get_args(Decay)))
        at_least_one("sft", token_budget=token_budget)
        not_negative("sft", threads=threads)
        self._data = data
        self._dialogues: list[Dialogue] = []
        self._batch_size = batch_size
        self._updates_per_step = updates_per_step
        self._is_shuffled = is_shuffled
        self._aggregation: MeanAggregation = aggregation
        self._token_budget = token_budget
        self._keep = keep
        self._save_every = save_every
        self._interval = SaveInterval("sft", save_every)
        self._is_moving = False  # in the middle of a step, when the weights belong to none
        self._updates = updates
        self._optim = OptimSettings(
            lr=lr,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            warmup=warmup,
            max_grad_norm=max_grad_norm,
            max_nonfinite=max_nonfinite,
        )
        self._decay: Decay = decay
        self._lora = LoraSettings.of(lora_rank, lora_alpha, lora_targets)
        self._device, self._dtype, self._threads = device, dtype, threads
        self._gradient_checkpointing = gradient_checkpointing
        self._learner: PolicyLearner | None = None
        self._step = 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Read the dialogues, and check that one policy with reachable weights is tuned."""
        self._context = context
        self._name = tuned_name(context, algorithm="sft")
        tuned_weights(context.current(self._name).resource, name=self._name)
        begin_saving(context, self.save, algorithm="sft", save_every=self._save_every)
        self._dialogues = read_dialogues(context.folder / self._data)
        self._batches = -(-len(self._dialogues) // self._batch_size)  # per epoch; the last one may be smaller
        self._updates = self._updates or self._batches
        # The length of the decay is known only now, after the file was read.
        self._settings = LearnerSettings(
            optim=replace(self._optim, decay=self._decay, total=self._updates),
            lora=self._lora,
            device=self._device,
            dtype=self._dtype,
            threads=self._threads,
            gradient_checkpointing=self._gradient_checkpointing,
        )

    async def step(self) -> StepReport:
        """Do the next `updates_per_step` updates, and publish after the last one."""
        context, step, started = self._context, self._step + 1, time.perf_counter()
        if self._learner is None:
            self._learner = await self._open()
            for notice in self._learner.notices:
                context.say(f"{context.name}: {notice}")
        learner = self._learner

        # A resumed step begins at a multiple of `updates_per_step`; the last step may be shorter.
        self._is_moving = True
        reports: list[dict[str, float]] = []
        stop = min(self._updates, step * self._updates_per_step)
        while learner.updates < stop:
            reports.append(await asyncio.to_thread(self._update, learner))
            context.progress(learner.updates, self._updates, f"loss {reports[-1].get('loss', math.nan):.3f}")

        is_finished = learner.updates >= self._updates
        self._step, self._is_moving = step, False
        self._interval.stepped()
        if context.defer is None:
            await self.save(True)
        metrics = {
            "loss": mean([report["loss"] for report in reports if "grad_norm" in report]),
            "grad_norm": mean([report["grad_norm"] for report in reports if "grad_norm" in report]),
            "tokens": sum(report["tokens"] for report in reports),
            "update_s": time.perf_counter() - started,
        }
        if notice := learner.skipped.news():
            context.say(f"{context.name}: {notice}")
            metrics["updates_nonfinite"] = sum(report.get("updates_nonfinite", 0.0) for report in reports)
        # Half-trained weights are saved and not served: what follows the decay is the result.
        published: tuple[str, ...] = ()
        if is_finished:
            resource = await asyncio.to_thread(learner.export, context.workdir, step=step, keep=self._keep)
            version = await context.publish(self._name, resource, step=step)
            published = (f"{self._name}@{version.version}",)
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            published=published,
            stop_reason=f"{self._updates} updates done" if is_finished else "",
        )

    async def save(self, must: bool) -> bool:
        """Write what training continues from; see `defer` of the context."""
        learner = self._learner
        if learner is None or self._is_moving or not (must or self._interval.is_due()):
            return False
        started = time.perf_counter()
        await asyncio.to_thread(learner.save, self._context.workdir, step=self._step, keep=self._keep)
        self._interval.saved(time.perf_counter() - started)
        return True

    def state(self) -> Mapping[str, Json]:
        """The counts and the newest checkpoint."""
        updates = self._learner.updates if self._learner is not None else 0
        return {"step": self._step, "updates": updates, "checkpoint": saved_path(self._context.workdir, self._step)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments included."""
        self._step = int(state["step"])
        if state["checkpoint"]:
            self._learner = await asyncio.to_thread(
                PolicyLearner.resume, Path(state["checkpoint"]), settings=self._settings
            )

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `updates` exceeds the updates done; the default of one epoch never asks for more."""
        del tasks, sources_go_on
        return int(state["updates"]) < self._updates

    async def close(self) -> None:
        """Drop the model."""
        self._learner = None

    async def _open(self) -> PolicyLearner:
        origin = tuned_weights(self._context.current(self._name).resource, name=self._name)
        return await asyncio.to_thread(lambda: PolicyLearner(origin=origin, settings=self._settings))

    def _update(self, learner: PolicyLearner) -> dict[str, float]:
        """Do one optimizer update and return its loss, gradient norm and number of trained tokens."""
        learner.use_threads()
        loaded = learner.loaded
        # Dropout draws by the update's number, as its dialogues are, so that a resumed run repeats it.
        seed = random.Random(f"{self._context.seed}/{self._context.name}/update/{learner.updates}").getrandbits(62)
        samples: list[RowSample] = []
        for dialogue in self._batch(learner.updates):
            # Tokenised per update: kept as tensors, a large file would take several times the memory of its text.
            samples += tokenize(dialogue, tokenizer=loaded.tokenizer, max_tokens=loaded.context_length)
        # w_t and the total of this update; the rows of one dialogue share its id and so its weight.
        weight, total = loss_weights(samples, aggregation=self._aggregation)
        loaded.model.train()  # dropout, where the model has any; the policy algorithms leave it off
        summed, tokens = 0.0, 0
        batches = micro_batches(
            samples,
            weight,
            total=total,
            token_budget=self._token_budget,
            device=loaded.device,
            is_packed=packs_rows(loaded.model),
        )
        with seeded(seed, device=loaded.device):
            for batch in batches:
                logp_M = batch.logprobs(loaded.model)  # [M], log pi(y_t | y_<t) of the assistant's tokens
                loss = -batch.mean(logp_M)  # -sum_t w_t logp_t / total, this batch's part
                backward(loss)  # gradients of micro-batches add up in the parameters
                summed += float(loss.detach())
                tokens += len(logp_M)
        return learner.apply({"loss": summed, "tokens": float(tokens)})

    def _batch(self, update: int) -> list[Dialogue]:
        """Return the dialogues of an update; a function of its number alone, so nothing about it is saved."""
        epoch, index = divmod(update, self._batches)
        order = list(range(len(self._dialogues)))
        if self._is_shuffled:
            random.Random(f"{self._context.seed}/{self._context.name}/{epoch}").shuffle(order)
        chosen = order[index * self._batch_size : (index + 1) * self._batch_size]
        return [self._dialogues[i] for i in chosen]
