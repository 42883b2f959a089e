"""DPO: learns which of two rollouts of a task was better, with no reward model and no sampling while it trains.

Paper: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7. For a pair of a chosen
rollout w and a rejected rollout l of one task (the paper's y_w and y_l)

    loss = -log sigmoid(beta m),   m = [log pi(w) - log ref(w)] - [log pi(l) - log ref(l)]

where log pi(rollout) sums over the policy's tokens of all its turns and rows. beta log pi/ref is the paper's implicit
reward, so beta m is the difference of two rewards. One step:

    1. take groups of rollouts: its own (`tasks_per_step`, `group_size`), or those that a `source` paid for
    2. pairs: in each group the best against the worst, or every pair, whose rewards differ by `min_gap` at least
    3. `epochs` passes over the pairs, `pairs_per_update` at a time
    4. publish the new weights

Deviations from the paper, and why:
- Preferences come from rewards, not from people. A group without a difference gives no pair.
- A rollout has several turns; observations between them are masked, because the policy did not write them.
- The sums over a pair need all its rows, which need not fit into one micro-batch. The gradient (section 4) is
  -beta sigmoid(-beta m) [grad log pi(w) - grad log pi(l)], so a first pass without gradient gives m, and the factor
  before the brackets then weights the tokens of a second pass. That is exact and costs one more forward pass.
- `reference = "behaviour"` takes the recorded log-probabilities of the sampler as the reference. No second model is
  held then, and the reference is the policy that acted. `"start"` is the paper's: the policy when this algorithm began.
- The temperature that a call was sampled with is part of the policy here, in pi and in the reference.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.batch import RowSample, from_row, micro_batches
from agl_algo_torch.forward import recompute_logprobs
from agl_algo_torch.learner import LearnerSettings, PolicyLearner, mean
from agl_algo_torch.model import LoraSettings
from agl_algo_torch.optim import OptimSettings
from agl_algo_torch.supply import RolloutSupply
from agl_algo_torch.tuned_policy import TunedPolicy, at_least_one, one_of
from agl_algo_torch.typed_torch import backward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode, Json

ReferenceKind = Literal["start", "behaviour"]
Pairing = Literal["extremes", "all"]
TASKS_PER_STEP, GROUP_SIZE = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rollouts of one task by id; `chosen` has the higher reward."""

    chosen: str
    rejected: str


class DPO:
    """Trains the weights of one policy on pairs of rollouts of one task, the better against the worse.

    Args:
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        beta: Strength of the reference: the inverse of how far the policy may go from it.
        min_gap: Least difference of two rewards that is a preference.
        pairs: `extremes` (one pair per group) or `all`.
        reference: `start` or `behaviour`, see the module.
        epochs: Passes over a step's pairs; `pairs_per_update` make one optimizer update.
        lr: Peak learning rate; `warmup` shapes it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
        token_budget: Padded tokens that one forward pass may take.
        lora_rank: 0 trains all weights; else the rank of LoRA adapters on `lora_targets` with `lora_alpha`.
        device: `auto`, `cpu`, `cuda` ...; `dtype` that of passes and exports; `threads` 0 leaves torch's.
        keep: Saved states and exported weights that stay on disk.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        steps: int | None = None,
        tasks_per_step: int | None = None,
        group_size: int | None = None,
        max_age: int = -1,
        beta: float = 0.1,  # the paper's default
        min_gap: float = 1e-6,  # in the unit of the reward; above the rounding of sums of rewards
        pairs: Pairing = "extremes",
        reference: ReferenceKind = "start",
        epochs: int = 1,
        pairs_per_update: int = 16,
        lr: float = 1e-6,
        warmup: int = 0,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        token_budget: int = 16_384,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_targets: tuple[str, ...] = ("all-linear",),
        device: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        keep: int = 2,
    ) -> None:
        one_of("dpo", pairs=(pairs, get_args(Pairing)), reference=(reference, get_args(ReferenceKind)))
        at_least_one("dpo", epochs=epochs, pairs_per_update=pairs_per_update, token_budget=token_budget, keep=keep)
        if group_size == 1 or beta <= 0 or min_gap <= 0:
            raise ConfigError(
                f"dpo got {group_size=}, {beta=} and {min_gap=}; a pair needs a group of 2 at least, "
                "and the other two must be above 0."
            )
        self._epochs, self._pairs_per_update = epochs, pairs_per_update
        self._beta, self._min_gap, self._token_budget = beta, min_gap, token_budget
        self._pairing: Pairing = pairs
        self._reference: ReferenceKind = reference
        settings = LearnerSettings(
            optim=OptimSettings(
                lr=lr,
                betas=(betas[0], betas[1]),
                weight_decay=weight_decay,
                warmup=warmup,
                max_grad_norm=max_grad_norm,
            ),
            lora=LoraSettings(rank=lora_rank, alpha=lora_alpha, targets=tuple(lora_targets)) if lora_rank else None,
            device=device,
            dtype=dtype,
            threads=threads,
        )
        self._tuned = TunedPolicy(settings=settings, algorithm="dpo", keep=keep, has_reference=reference == "start")
        self._supply = RolloutSupply(
            algorithm="dpo", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
        )
        self._step, self._updates = 0, 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned, and where the rollouts come from."""
        self._context = context
        self._tuned.begin(context)
        self._supply.begin(context)

    async def step(self) -> StepReport:
        """Take groups, make pairs, update, save and publish."""
        step = self._step + 1
        learner = await self._tuned.learner(updates=self._updates)

        # 1. Take groups.
        given = await self._supply.take(step)

        # 2. Make pairs. A rollout may be in several of them, but its rows are built once.
        pairs = [pair for group in given.groups for pair in make_pairs(group, gap=self._min_gap, pairing=self._pairing)]
        chosen = {rollout for pair in pairs for rollout in (pair.chosen, pair.rejected)}
        rows = [row for group in given.groups for e in group if e.rollout.rollout_id in chosen for row in _live_rows(e)]

        # 3. Update.
        started = time.perf_counter()
        metrics = given.metrics | await self._train(learner, pairs, rows)
        metrics |= {"pairs": float(len(pairs)), "update_s": time.perf_counter() - started}

        # 4. Save, then publish; without a pair the weights are what they were, so there is nothing to publish.
        await self._tuned.save(step=step)
        published = (await self._tuned.publish(step=step),) if pairs else ()
        self._step, self._updates = step, learner.updates
        return StepReport(
            step=step,
            is_finished=bool(given.stop_reason),
            metrics=metrics,
            trained=tuple(dict.fromkeys(row.rollout for row in rows)),
            published=published,
            stop_reason=given.stop_reason,
        )

    def state(self) -> Mapping[str, Json]:
        """Return the counts, how far the sources were read, the newest checkpoint and the version it started from."""
        own: dict[str, Json] = {"step": self._step, "updates": self._updates}
        return own | self._supply.state() | self._tuned.state(step=self._step)

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments and the reference included."""
        self._step, self._updates = int(state["step"]), int(state["updates"])
        self._supply.restore(state)
        await self._tuned.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        await self._tuned.go_back(state, rate=rate, updates=self._updates)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done, or when an exhausted source continues."""
        del tasks
        return self._supply.has_more(state, step=int(state["step"]), sources_go_on=sources_go_on)

    async def close(self) -> None:
        """Drop the model and the reference."""
        self._tuned.close()

    async def _train(self, learner: PolicyLearner, pairs: list[Pair], rows: list[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates."""
        if not pairs:
            return {"updates_skipped": 1.0}
        # log ref does not change while the policy does: one pass serves all epochs.
        reference = await asyncio.to_thread(self._reference_sums, learner, rows)
        by_rollout: defaultdict[str, list[RowSample]] = defaultdict(list)
        for row in rows:
            by_rollout[row.rollout].append(row)
        reports: list[dict[str, float]] = []
        for epoch in range(self._epochs):
            order = list(pairs)
            # Seeded by what a resumed run knows too, so that it sees the pairs in the same order.
            random.Random(f"{self._context.seed}/{self._context.name}/{self._step}/{epoch}").shuffle(order)
            for start in range(0, len(order), self._pairs_per_update):
                part = order[start : start + self._pairs_per_update]
                reports.append(await asyncio.to_thread(self._update, learner, part, by_rollout, reference))
                self._context.progress(epoch * len(order) + start + len(part), self._epochs * len(order), "update")
        # Every update reports the same names, because every update has pairs.
        return {name: mean([report[name] for report in reports]) for name in reports[0]}

    def _reference_sums(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Return log ref(rollout) by rollout, in nats, before the step's first update."""
        learner.use_threads()
        if self._reference == "behaviour":
            # The sampler recorded log pi_behaviour of every token that it drew; the mask removes what it read.
            return _rollout_sums(rows, [row.behaviour * row.mask for row in rows])
        # The policy as it was when this algorithm began, asked about the same tokens at the same temperatures.
        with self._tuned.reference.active() as model:
            return _rollout_sums(
                rows, recompute_logprobs(model, rows, token_budget=self._token_budget, device=learner.loaded.device)
            )

    def _update(
        self,
        learner: PolicyLearner,
        pairs: Sequence[Pair],
        by_rollout: Mapping[str, Sequence[RowSample]],
        reference: Mapping[str, float],
    ) -> dict[str, float]:
        """Do one optimizer update on whole pairs and return its metrics, averaged over the pairs."""
        learner.use_threads()
        model, device = learner.loaded.model, learner.loaded.device
        # Each rollout is run once, however many pairs it is in.
        rollouts = dict.fromkeys(name for pair in pairs for name in (pair.chosen, pair.rejected))
        rows = [row for name in rollouts for row in by_rollout[name]]

        # First pass, without gradient: m = [log pi(w) - log ref(w)] - [log pi(l) - log ref(l)] of every pair.
        policy = _rollout_sums(rows, recompute_logprobs(model, rows, token_budget=self._token_budget, device=device))
        ratio = {name: policy[name] - reference[name] for name in rollouts}  # log pi / ref
        margins = [ratio[pair.chosen] - ratio[pair.rejected] for pair in pairs]

        # -d loss / d log pi(w) = beta sigmoid(-beta m) / pairs, and the same with the other sign for l. It is near
        # beta where the policy has the pair the wrong way round, and near 0 where it already prefers w clearly.
        factor: defaultdict[str, float] = defaultdict(float)  # adds up over the pairs that a rollout is in
        for pair, margin in zip(pairs, margins, strict=True):
            slope = self._beta * _sigmoid(-self._beta * margin) / len(pairs)
            factor[pair.chosen] += slope
            factor[pair.rejected] -= slope

        # Second pass: the loss sum_t -factor * log pi(y_t) is linear in log pi, and has the gradient of DPO's.
        for batch in micro_batches(
            [replace(row, advantages=row.mask * factor[row.rollout]) for row in rows],  # [T], the factor per token
            [1.0] * len(rows),  # not used: the mean over pairs is in the factor
            token_budget=self._token_budget,
            device=device,
        ):
            backward(-(batch.advantages_M * batch.logprobs(batch.logits(model))).sum())
        return {
            "loss": mean([-_log_sigmoid(self._beta * margin) for margin in margins]),  # log 2 at the start
            "margin": mean(margins),  # m in nats
            "accuracy": mean([float(margin > 0) for margin in margins]),  # pairs that the policy ranks as the rewards
            "grad_norm": learner.apply(),
        }


def make_pairs(group: Sequence[Episode], *, gap: float, pairing: Pairing) -> list[Pair]:
    """Return the pairs of a group, best rollouts first; of equal rewards the earlier rollout comes first.

    Only rollouts with a reward and with tokens of the policy take part. `extremes` gives one pair at most. A group of
    one rollout, or one whose rewards differ by less than `gap`, gives none.
    """
    # `reward or 0.0` is for the type checker: rollouts without a reward are filtered out here.
    ranked = sorted(
        (e for e in group if e.reward is not None and any(any(row.mask) for row in e.rows)),
        key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id),
    )
    found = [
        Pair(chosen=better.rollout.rollout_id, rejected=worse.rollout.rollout_id)
        for index, better in enumerate(ranked)
        for worse in ranked[index + 1 :]
        if (better.reward or 0.0) - (worse.reward or 0.0) >= gap
    ]
    if pairing == "all" or not found:
        return found
    # Best against worst has the largest gap of the group, and one pair lets every task count the same.
    return [Pair(chosen=ranked[0].rollout.rollout_id, rejected=ranked[-1].rollout.rollout_id)]


def _live_rows(episode: Episode) -> list[RowSample]:
    """Return the rows of an episode that have trained tokens, as samples with advantage 1 there."""
    live = {call.span_id: 1.0 for call in episode.transitions if not call.reject}
    # pi is the distribution that was sampled from, so its temperature belongs to log pi.
    temperatures = {call.span_id: call.temperature for call in episode.transitions}
    rows = [from_row(row, advantages=live, temperatures=temperatures) for row in episode.rows]
    return [row for row in rows if row.trained_tokens]


def _rollout_sums(rows: Sequence[RowSample], values: Sequence[Tensor]) -> dict[str, float]:
    """Return the sum of `values` ([T] per row, 0 outside of the mask) over all rows of each rollout."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row, value in zip(rows, values, strict=True):
        # A row's first token is never predicted, so it must not count on the reference's side alone.
        # float64: m is a small difference of sums over thousands of tokens.
        sums[row.rollout] += float(value[1:].double().sum())
    return dict(sums)


def _sigmoid(x: float) -> float:
    # Two forms of one function, each with an exponent that is never positive, so nothing overflows.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _log_sigmoid(x: float) -> float:
    # log sigmoid(x) = -log(1 + exp(-x)) = min(x, 0) - log(1 + exp(-|x|)), which loses no digits for large |x|.
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))
