"""RFT: supervised fine-tuning on the good rollouts that another algorithm, or this one, paid for.

Paper: Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning" (arXiv 2308.01825), "Rejection
sampling fine-tuning": sample several answers per task, keep the right ones, fine-tune on them. One step:

    1. take groups of rollouts: its own (`tasks_per_step`, `group_size`), or those that a `source` paid for
    2. keep those with at least `min_reward`, of each group the `best` at most
    3. minimise -sum_t w_t log pi(y_t | y_<t) over the policy's tokens, `epochs` passes, `rollouts_per_update` at a time
    4. publish the new weights

Minimising 3. is the policy gradient with reward 1 for the rollouts that were kept and 0 for the others, without a
baseline: bad rollouts teach nothing here.

Deviations from the paper, and why:
- Rollouts have several turns; what the policy did not write is masked.
- The very tokens that were sampled are trained; nothing is rendered again. The rollouts must therefore be the tuned
  policy's own. To imitate another model, write its runs to a file (`agl data export`) and use `sft`.
- Equal answers are kept, where the paper removes them: siblings are samples, and how often an answer appears is its
  probability.
- Training continues from the current weights, where the paper starts again from the pretrained model: here the model
  is served between two steps.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.supply import RolloutSupply
from agl_algo_torch.learner.batch import RowSample, from_row, loss_weights, micro_batches
from agl_algo_torch.learner.model import LoraSettings
from agl_algo_torch.learner.optim import OptimSettings
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.tuned_policy import TunedPolicy, at_least_one, one_of
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.aggregation import MEANS, MeanAggregation
from agl_objectives.groups import Silence
from agl_objectives.reports import averaged
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import Curriculum  # noqa: TC001 - the parameter check resolves it
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Episode, Json

NONE_GOOD = (
    "silent, dropped: no rollout of its group has min_reward, and the step took further tasks in its place (refill)"
)
"""Said by `agl why` of the calls of a group that was replaced."""


class RFT:
    """Fine-tunes the weights of one policy on the best of its own rollouts.

    Args:
        min_reward: Least reward of a rollout that is imitated.
        best: Most rollouts of one group; 0 for all.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        refill: Rounds in which groups without a rollout to imitate are replaced by those of further tasks; 0 keeps
            every group. Refused with a source, as `curriculum` is.
        curriculum: `frontier` prefers tasks of which about half of the rollouts succeeded when they were last drawn,
            `unsolved` those with the worst rewards; at least the share `curriculum_uniform` of a step's tasks is drawn
            without preference.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        epochs: Passes over a step's rollouts; `rollouts_per_update` make one optimizer update.
        aggregation: `token`, or `sequence`: every rollout counts the same, however long.
        lr: Peak learning rate; `warmup` shapes it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
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
        min_reward: float,
        best: int = 0,  # the paper keeps every right answer that is new
        steps: int | None = None,
        tasks_per_step: int | None = None,
        group_size: int | None = None,
        refill: int = 0,
        curriculum: Curriculum = "",
        curriculum_uniform: float = 0.5,
        max_age: int = -1,
        epochs: int = 1,
        rollouts_per_update: int = 16,
        aggregation: MeanAggregation = "token",
        lr: float = 1e-5,
        warmup: int = 0,
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
        one_of("rft", aggregation=(aggregation, MEANS))
        counts = {"epochs": epochs, "rollouts_per_update": rollouts_per_update, "token_budget": token_budget}
        at_least_one("rft", **counts, keep=keep)
        if best < 0:
            raise ConfigError(f"rft got best = {best}; give how many rollouts of a group are kept, or 0 for all.")
        self._min_reward, self._best = min_reward, best
        self._epochs, self._rollouts_per_update = epochs, rollouts_per_update
        self._aggregation: MeanAggregation = aggregation
        self._token_budget = token_budget
        settings = LearnerSettings(
            optim=OptimSettings(
                lr=lr,
                betas=(betas[0], betas[1]),
                weight_decay=weight_decay,
                warmup=warmup,
                max_grad_norm=max_grad_norm,
                max_nonfinite=max_nonfinite,
            ),
            lora=LoraSettings.of(lora_rank, lora_alpha, lora_targets),
            device=device,
            dtype=dtype,
            threads=threads,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._tuned = TunedPolicy(settings=settings, algorithm="rft", keep=keep, save_every=save_every)
        self._supply = RolloutSupply(
            algorithm="rft",
            steps=steps,
            tasks_per_step=tasks_per_step,
            group_size=group_size,
            max_age=max_age,
            refill=refill,
            silence=Silence(of=self._has_none, note=NONE_GOOD),
            curriculum=curriculum,
            uniform=curriculum_uniform,
        )
        self._step, self._updates = 0, 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned, and where the rollouts come from."""
        self._context = context
        self._tuned.begin(context)
        self._supply.begin(context)

    async def step(self) -> StepReport:
        """Take groups, keep the good ones, update, save and publish."""
        step = self._step + 1
        learner = await self._tuned.learner(updates=self._updates)
        moves = learner.moves

        # 1. and 2. Take groups and keep their good rollouts.
        given = await self._supply.take(step)
        rows = [row for group in given.groups for episode in self._good(group) for row in _live_rows(episode)]

        # 3. Update.
        started = time.perf_counter()
        self._tuned.start_updates()
        metrics = given.metrics | await self._train(learner, rows)
        metrics["update_s"] = time.perf_counter() - started

        # 4. Make the new weights live; without an update they are what they were. Save them unless that may wait.
        published = await self._tuned.finish(step=step, has_moved=learner.moves > moves)
        self._step, self._updates = step, learner.updates
        return StepReport(
            step=step,
            is_finished=bool(given.stop_reason),
            metrics=metrics,
            trained=tuple(dict.fromkeys(row.rollout for row in rows)),
            published=published,
            stop_reason=given.stop_reason,
            uses=_uses(given.groups, {row.rollout for row in rows}) | given.uses,
        )

    def state(self) -> Mapping[str, Json]:
        """Return the counts, how far the sources were read, the newest checkpoint and the version it started from."""
        own: dict[str, Json] = {"step": self._step, "updates": self._updates}
        return own | self._supply.state() | self._tuned.state(step=self._step)

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments included."""
        self._step, self._updates = int(state["step"]), int(state["updates"])
        self._supply.restore(state)
        await self._tuned.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        await self._tuned.go_back(state, rate=rate, updates=self._updates)

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many tasks a step draws of so many, and how often it runs each, for `agl check --forecast`."""
        return self._supply.size(tasks)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done, or when an exhausted source continues."""
        del tasks
        return self._supply.has_more(state, step=int(state["step"]), sources_go_on=sources_go_on)

    async def close(self) -> None:
        """Drop the model."""
        self._tuned.close()

    def _good(self, group: Sequence[Episode]) -> list[Episode]:
        """Return the rollouts of a group that are imitated, best first; of equal ones the earlier comes first."""
        # A missing reward is not a bad one, but nothing says that the rollout deserves to be imitated.
        good = [e for e in group if e.reward is not None and e.reward >= self._min_reward]
        # The id breaks ties, so that a repeated step keeps the same rollouts.
        good.sort(key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id))
        return good[: self._best or None]  # `best` 0 keeps all; otherwise easy tasks cannot fill the batch

    async def _has_none(self, group: Sequence[Episode]) -> bool:
        """Return true if no rollout of a group is imitated."""
        return not self._good(group)

    async def _train(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates."""
        by_rollout: defaultdict[str, list[RowSample]] = defaultdict(list)
        for row in rows:
            by_rollout[row.rollout].append(row)
        reports: list[dict[str, float]] = []
        for epoch in range(self._epochs):
            order = list(by_rollout)
            # Seeded by what a resumed run knows too, so that it sees the rollouts in the same order.
            random.Random(f"{self._context.seed}/{self._context.name}/{self._step}/{epoch}").shuffle(order)
            for start in range(0, len(order), self._rollouts_per_update):
                part = [row for name in order[start : start + self._rollouts_per_update] for row in by_rollout[name]]
                reports.append(await asyncio.to_thread(self._update, learner, part))
                self._context.progress(epoch * len(order) + start, self._epochs * len(order), "update")
        # No good rollout is no error: a hard batch leaves the weights alone, and the metric shows it.
        kept = {"imitated": float(len(by_rollout))}
        if not reports:
            return kept | {"updates_skipped": 1.0}
        return kept | averaged(reports)

    def _update(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Do one optimizer update on whole rollouts and return its metrics."""
        learner.use_threads()
        loaded = learner.loaded
        # w_t: "token" is the usual cross-entropy; "sequence" keeps long rollouts from outvoting short ones.
        weight, total = loss_weights(rows, aggregation=self._aggregation)
        summed = 0.0
        for batch in micro_batches(
            rows,
            weight,
            total=total,
            token_budget=self._token_budget,
            device=loaded.device,
            is_packed=packs_rows(loaded.model),
        ):
            # -sum_t w_t log pi(y_t | y_<t) / total over this batch's tokens: [M] -> []
            loss = -batch.mean(batch.logprobs(loaded.model))
            backward(loss)  # gradients of micro-batches add up in the parameters
            summed += float(loss.detach())
        return learner.apply({"loss": summed})


def _uses(groups: Sequence[Sequence[Episode]], imitated: Collection[str]) -> dict[str, tuple[CallUse, ...]]:
    """Return what became of every call, by rollout id."""
    left_out = "its rollout is not among those that are imitated (min_reward, best)"
    uses: dict[str, tuple[CallUse, ...]] = {}
    for episode in (episode for group in groups for episode in group):
        rollout = episode.rollout.rollout_id
        live = {call.span_id for call in episode.transitions} if rollout in imitated else ()
        uses[rollout] = call_uses(episode, trained=live, left_out=left_out)
    return uses


def _live_rows(episode: Episode) -> list[RowSample]:
    """Return the rows of an episode that have trained tokens."""
    # The temperature is left at 1: what is imitated is the answer, by the distribution that the model has by itself.
    live = {call.span_id: 1.0 for call in episode.transitions if not call.reject}
    rows = [from_row(row, advantages=live) for row in episode.rows]
    return [row for row in rows if row.trained_tokens]
