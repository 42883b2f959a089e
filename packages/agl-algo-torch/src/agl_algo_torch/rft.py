"""RFT: supervised fine-tuning on good rollouts, which this algorithm or another one has collected.

Paper: Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning" (arXiv 2308.01825), "Rejection
sampling fine-tuning": sample several answers per task, keep the right ones, fine-tune on them. One step:

    1. collect groups of rollouts (`tasks_per_step`, `group_size`), or take the groups of a `source`
    2. keep the rollouts with at least `min_reward`, at most `best` of each group
    3. minimise -sum_t w_t log pi(y_t | y_<t) over the policy's tokens, in `epochs` passes; an update takes
       `rollouts_per_update` rollouts
    4. publish the new weights

The gradient of 3. is a policy gradient without a baseline, with a reward of 1 for the rollouts that were kept and of 0
for the others. Bad rollouts therefore teach nothing.

Deviations from the paper, and why:
- Rollouts have several turns; the tokens that the policy did not write are masked.
- The sampled token ids themselves are trained; no text is rendered again. The rollouts must therefore be the tuned
  policy's own. To imitate another model, write the runs of that model to a file (`agl data export`) and use `sft`.
- Equal answers are all kept, while the paper keeps one: siblings are samples, so the number of equal answers estimates
  the answer's probability.
- Training continues from the current weights, because the model is served between two steps. The paper starts again
  from the pretrained model.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from agl.contracts import StepReport
from agl_algo_torch.data.credited_rows import live_rows
from agl_algo_torch.data.supply import Age, RolloutSupply, Supplied
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.tuned_policy import TunedPolicy
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.aggregation import MeanAggregation, loss_weights
from agl_objectives.groups import Silence
from agl_objectives.reports import averaged
from agl_objectives.settings import Compute, Count, Lora, Optim, Sampling, Saving, Whole
from agl_objectives.uses import rollout_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl.schemas import Episode
    from agl_algo_torch.learner.batch import RowSample

NONE_GOOD = (
    "silent, dropped: no rollout of its group has min_reward, and the step took further tasks in its place (refill)"
)
"""Note that `agl why` shows for the calls of a group that was replaced."""

NOT_IMITATED = "its rollout is not among those that are imitated (min_reward, best)"


class RFT(Supplied):
    """Fine-tunes the weights of one policy on the best of its own rollouts.

    Args:
        min_reward: Smallest reward of a rollout that is imitated.
        best: Largest number of rollouts that are imitated from one group, the best first; 0 for no limit.
        steps: Number of steps; 1 by default. With a source, an upper limit; without `steps`, the algorithm then
            continues until the source has no more rollouts.
        tasks_per_step: Groups per step, by default 16; refused with a source, which brings its own groups.
        group_size: Rollouts per task, by default 4; refused with a source.
        sampling: The choice of tasks; `refill` replaces groups without a rollout to imitate. Refused with a source.
        max_age: With a source, how many versions of the tuned policy a rollout may be behind; -1 for no limit.
        epochs: Passes over the rollouts that a step imitates.
        rollouts_per_update: Rollouts of one optimizer update.
        aggregation: `token` (every token counts the same) or `sequence` (every rollout counts the same).
        optim: AdamW; `decay` is refused.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        min_reward: float,
        best: Whole = 0,  # the paper keeps every right answer that is new
        steps: Count | None = None,
        tasks_per_step: Count | None = None,
        group_size: Count | None = None,
        sampling: Sampling = Sampling(),
        max_age: Age = -1,
        epochs: Count = 1,
        rollouts_per_update: Count = 16,
        aggregation: MeanAggregation = "token",
        optim: Optim = Optim(lr=1e-5),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        self._min_reward, self._best = min_reward, best
        self._epochs, self._rollouts_per_update = epochs, rollouts_per_update
        self._aggregation: MeanAggregation = aggregation
        self._tuned = TunedPolicy(
            "rft", settings=LearnerSettings(optim=optim, lora=lora, compute=compute), saving=saving
        )
        self._supply = RolloutSupply(
            "rft",
            steps=steps,
            tasks_per_step=tasks_per_step,
            group_size=group_size,
            max_age=max_age,
            sampling=sampling,
            silence=Silence(of=self._has_none, note=NONE_GOOD),
        )

    async def step(self) -> StepReport:
        """Take groups, keep the good ones, update, save and publish."""
        learner = await self._tuned.learner()
        moves = learner.moves

        # 1. and 2. Take groups of K answers per task, sampled from pi, and keep the good ones: rejection sampling from
        # pi( . | reward >= min_reward), with which the paper augments its data set.
        given = await self._supply.take(self._tuned.step + 1)
        # q of the paper is a task, and r^i_q the answers kept of it, at most `best`.
        good = [episode for group in given.groups for episode in self._good(group)]
        # The temperature is left at 1: the model's own distribution imitates the answer.
        pictures = self._tuned.pictures
        rows = [row for episode in good for row in live_rows(episode, has_temperature=False, pictures=pictures)]

        imitated = {row.rollout: "" for row in rows}  # each id once, in order

        # 3. Update. The gradient is that of REINFORCE with the reward 1[R >= min_reward] and no baseline,
        #     sum_i 1[R_i >= min_reward] grad log pi(y_i | x),
        # as long as pi is the policy that sampled: in the first update of a step.
        started = time.perf_counter()
        self._tuned.start_updates()
        metrics = given.metrics | await self._train(learner, rows)
        metrics["update_s"] = time.perf_counter() - started  # forward, backward and AdamW, without the rollouts

        # 4. Publish the new weights, if there was an update. Save a state of training, unless saving is deferred.
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        return StepReport(
            step=self._tuned.step,
            is_finished=bool(given.stop_reason),
            metrics=metrics,
            trained=tuple(imitated),
            published=published,
            stop_reason=given.stop_reason,
            uses=rollout_uses(given.episodes, imitated, left_out=NOT_IMITATED) | given.uses,
        )

    def _good(self, group: Sequence[Episode]) -> list[Episode]:
        """Return the rollouts of a group to imitate, by falling reward, then by id."""
        # A rollout without a reward is not known to be good, and one that failed is not good, whatever reward `failed`
        # gives it.
        known = ((e, e.reward) for e in group if e.rollout.status == "succeeded")
        good = [e for e, reward in known if reward is not None and reward >= self._min_reward]
        # The id breaks ties, so that a repeated step keeps the same rollouts.
        good.sort(key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id))
        return good[: self._best or None]  # `best` 0 keeps all; otherwise easy tasks cannot fill the batch

    async def _has_none(self, group: Sequence[Episode]) -> bool:
        """Return true if no rollout of the group is to be imitated."""
        return not self._good(group)

    async def _train(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates."""
        # The rows of a rollout stay in one update, where they share its weight.
        by_rollout: defaultdict[str, list[RowSample]] = defaultdict(list)
        for row in rows:
            by_rollout[row.rollout].append(row)
        reports: list[dict[str, float]] = []
        for epoch in range(self._epochs):
            order = list(by_rollout)
            # Seeded by what a resumed run knows too, so that it sees the rollouts in the same order.
            random.Random(f"{self._context.seed}/{self._context.name}/{self._tuned.step}/{epoch}").shuffle(order)
            for start in range(0, len(order), self._rollouts_per_update):
                part = [row for name in order[start : start + self._rollouts_per_update] for row in by_rollout[name]]
                reports.append(await asyncio.to_thread(self._update, learner, part))
                self._context.progress(epoch * len(order) + start, self._epochs * len(order), "update")
        # A step without a good rollout is not an error: a hard batch leaves the weights alone, and the metric shows it.
        kept = {"imitated": float(len(by_rollout))}
        if not reports:
            return kept | {"updates_skipped": 1.0}
        return kept | averaged(reports)

    def _update(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Do one optimizer update on whole rollouts and return its metrics."""
        learner.use_threads()
        loaded = learner.loaded
        # w_t: "token" is the usual cross-entropy; "sequence" keeps long rollouts from outvoting short ones.
        # The total is that of the update, so its micro-batches add up to the mean over the update.
        weight, total = loss_weights(rows, aggregation=self._aggregation)
        summed = 0.0
        for batch in learner.batches(rows, weight, total=total):
            # The paper's loss on its augmented data set, -sum_t w_t log pi(y_t | y_<t) / total, over this batch's
            # tokens y_t of the policy: [M] -> []
            loss = -batch.mean(batch.logprobs(loaded.model))
            backward(loss)  # gradients of micro-batches add up in the parameters
            summed += float(loss.detach())
        return learner.apply({"loss": summed})
