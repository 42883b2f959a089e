"""Supervised fine-tuning on dialogues: teaches a model format and skill, so that it can then learn from rewards.

Objective: minimise `-sum_t w_t log pi(y_t | y_<t)` over assistant tokens, one update per batch of dialogues.

    aggregation "token"     w = 1 / assistant tokens of the batch: the usual cross-entropy
    aggregation "sequence"  w = 1 / (tokens of the dialogue * dialogues): long dialogues count no more than short

There is no paper to deviate from. Two things differ from common practice. A template that re-renders earlier turns
gives several rows per dialogue, which share the dialogue's weight. Batches are cut from the order of the file
(`is_shuffled = false`) or from one shuffle per epoch, which depends only on seed, name and epoch. A resumed run
therefore sees the same batches.

One step of the algorithm has `updates_per_step` optimizer updates; weights are published after the last update of the
run. `dialogues` reads and tokenises the dialogues.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from agl.contracts import StepReport
from agl_algo_torch.data.dialogues import check_dialogues, read_dialogues, tokenize
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, mean
from agl_algo_torch.learner.tuned_policy import TunedPolicy
from agl_algo_torch.learner.typed_torch import backward, seeded
from agl_objectives.aggregation import MeanAggregation, loss_weights
from agl_objectives.settings import Compute, Count, Lora, Optim, Saving, Whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json
    from agl_algo_torch.data.dialogues import Dialogue
    from agl_algo_torch.learner.batch import RowSample


class SFT:
    """Fine-tunes the weights of one policy on the dialogues in a JSON-lines file.

    Args:
        data: Path of a JSON-lines file, relative to the experiment's file. Each line is `{"messages": [...], "tools":
            [...]}`.
        updates: Number of optimizer updates; 0 for one pass over the data.
        batch_size: Dialogues per update.
        updates_per_step: Updates per step; states are saved between steps.
        is_shuffled: Whether dialogues are shuffled anew for every epoch; otherwise they keep the order of the file.
        aggregation: `token` (every token counts the same) or `sequence` (every dialogue counts the same).
        optim: AdamW. By default the rate falls to 0, because a constant rate leaves the noise of the last batches in
            the weights.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    def __init__(
        self,
        *,
        data: str,
        updates: Whole = 0,
        batch_size: Count = 16,
        updates_per_step: Count = 10,
        is_shuffled: bool = True,
        aggregation: MeanAggregation = "token",
        optim: Optim = Optim(lr=1e-5, decay="linear"),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        self._data, self._dialogues = data, list["Dialogue"]()
        self._updates, self._updates_per_step = updates, updates_per_step
        self._batch_size, self._is_shuffled = batch_size, is_shuffled
        # w_t of the objective. "sequence" keeps a few long dialogues from outvoting many short ones.
        self._aggregation: MeanAggregation = aggregation
        # A decay needs the number of updates, which is known after the file was read; 1 stands for it until then.
        settings = LearnerSettings(
            optim=optim, lora=lora, compute=compute, total=updates or 1, per_step=updates_per_step
        )
        self._tuned = TunedPolicy("sft", settings=settings, saving=saving)
        self._is_checked = False

    def run_size(self, context: AlgorithmContext) -> tuple[int, int]:
        """Return the numbers of rollouts, which is 0, and of steps of a run, for `agl check --forecast`."""
        dialogues = len(read_dialogues(context.folder / self._data))
        updates = self._updates or math.ceil(dialogues / self._batch_size)
        return 0, math.ceil(updates / self._updates_per_step)

    async def setup(self, context: AlgorithmContext) -> None:
        """Read the dialogues; raises ConfigError unless one policy is tuned whose weights can be trained here."""
        self._context = context
        self._tuned.begin(context, publishes_steps=False)
        self._dialogues = read_dialogues(context.folder / self._data)
        # A step of the optimizer sees B = `batch_size` dialogues; one pass over all of them is ceil(n / B) updates.
        self._batches = math.ceil(len(self._dialogues) / self._batch_size)  # per epoch; the last one may be smaller
        self._updates = self._updates or self._batches
        self._tuned.settings = replace(self._tuned.settings, total=self._updates)

    async def step(self) -> StepReport:
        """Do the next `updates_per_step` updates; publish the weights after the last update of the run."""
        context, started = self._context, time.perf_counter()
        learner = await self._tuned.learner()
        if not self._is_checked:  # a dialogue that cannot be rendered would otherwise end the run in a later step
            await asyncio.to_thread(self._check, learner)

        # A resumed step begins at a multiple of `updates_per_step`; the last step may be shorter.
        self._tuned.start_updates()
        reports: list[dict[str, float]] = []
        stop = min(self._updates, (self._tuned.step + 1) * self._updates_per_step)
        while learner.updates < stop:
            reports.append(await asyncio.to_thread(self._update, learner))
            context.progress(learner.updates, self._updates, f"loss {reports[-1].get('loss', math.nan):.3f}")

        # The decay brings the rate to 0 at the last update: only then have the weights settled.
        is_finished = learner.updates >= self._updates
        # Weights before the end of the decay are saved but not served.
        published = await self._tuned.finish(has_moved=is_finished)
        # An update with a gradient that is not finite was skipped, and has no gradient norm to average.
        done = [report for report in reports if "grad_norm" in report]
        # The loss is the mean -log pi(y_t) in nats: exp(loss) is the perplexity of the assistant's tokens.
        metrics = {
            "loss": mean([report["loss"] for report in done]),
            "grad_norm": mean([report["grad_norm"] for report in done]),
            "tokens": sum(report["tokens"] for report in reports),
            "update_s": time.perf_counter() - started,
        }
        if len(done) < len(reports):
            metrics["updates_nonfinite"] = float(len(reports) - len(done))
        return StepReport(
            step=self._tuned.step,
            is_finished=is_finished,
            metrics=metrics,
            published=published,
            stop_reason=f"updates done: {self._updates}" if is_finished else "",
        )

    def _check(self, learner: PolicyLearner) -> None:
        """Render and tokenise all dialogues; raises DatasetError for the first that cannot be used."""
        loaded = learner.loaded
        for text in check_dialogues(
            self._dialogues,
            tokenizer=loaded.tokenizer,
            max_tokens=loaded.context_length,
            stop_ids=loaded.stop_ids,
            modality=loaded.modality,
        ):
            self._context.say(text)
        self._is_checked = True

    def _update(self, learner: PolicyLearner) -> dict[str, float]:
        """Do one optimizer update and return its loss, gradient norm and number of trained tokens."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        loaded = learner.loaded
        # The seed of dropout follows from the update's number, so that a resumed run repeats the update.
        seed = random.Random(f"{self._context.seed}/{self._context.name}/update/{learner.updates}").getrandbits(62)
        samples: list[RowSample] = []
        for dialogue in self._batch(learner.updates):
            # Tokenised per update: kept as tensors, a large file would take several times the memory of its text.
            samples += tokenize(
                dialogue,
                tokenizer=loaded.tokenizer,
                max_tokens=loaded.context_length,
                stop_ids=loaded.stop_ids,
                modality=loaded.modality,
            )
        # w_t and the total of this update; the rows of one dialogue share its id and so its weight.
        weight, total = loss_weights(samples, aggregation=self._aggregation)
        # The objective: -sum_t w_t log pi(y_t | y_<t) / total over the assistant's tokens y_t; the tokens before them
        # are given. Its expected value is the cross-entropy H(data, pi) = KL(data || pi) + H(data), which is smallest
        # where pi is the distribution of the data (maximum likelihood).
        loaded.model.train()  # dropout, where the model has any; the policy algorithms leave it off
        summed, tokens = 0.0, 0
        with seeded(seed, device=loaded.device):
            for batch in learner.batches(samples, weight, total=total):
                logp_M = batch.logprobs(loaded.model)  # [M], log pi(y_t | y_<t) of the assistant's tokens
                loss = -batch.mean(logp_M)  # -sum_t w_t logp_t / total, this batch's part
                backward(loss)  # gradients of micro-batches add up in the parameters
                summed += float(loss.detach())
                tokens += len(logp_M)
        return learner.apply({"loss": summed, "tokens": float(tokens)})

    def _batch(self, update: int) -> list[Dialogue]:
        """Return the dialogues of an update, which depend only on the update's number, so they need not be saved."""
        epoch, index = divmod(update, self._batches)
        order = list(range(len(self._dialogues)))
        if self._is_shuffled:
            random.Random(f"{self._context.seed}/{self._context.name}/{epoch}").shuffle(order)
        # Without replacement: every dialogue once per epoch, the last batch perhaps smaller.
        chosen = order[index * self._batch_size : (index + 1) * self._batch_size]
        return [self._dialogues[i] for i in chosen]

    def state(self) -> Mapping[str, Json]:
        """Return the state of `TunedPolicy`: the counts and the newest checkpoint."""
        return self._tuned.state()

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights and optimizer moments."""
        await self._tuned.restore(state)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if fewer than `updates` updates are done; always false with the default, one epoch."""
        del tasks, sources_go_on
        return int(state["updates"]) < self._updates

    async def close(self) -> None:
        """Drop the model."""
        self._tuned.close()
