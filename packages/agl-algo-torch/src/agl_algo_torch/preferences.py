"""DPO, IPO and KTO: learn from the better and the worse of recorded rollouts, with no sampling while they train.

All three compare the policy with a reference policy by the log-ratio of whole rollouts,

    r = log pi(rollout) - log ref(rollout),   log pi(rollout) = sum over the policy's tokens of all its turns and rows

and differ in the loss that they make of it. w and l are the chosen and the rejected of two rollouts of one task, and
m = r(w) - r(l) is their margin.

    dpo   loss = -log sigmoid(beta m)
          Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7; beta r is the implicit
          reward.
    ipo   loss = (m - 1 / (2 beta))^2
          Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences" (arXiv
          2310.12036), equation 17; beta is its tau.
    kto   loss = 1 - sigmoid(beta (r - z)) for a good rollout, 1 - sigmoid(beta (z - r)) for a bad one, each weighted
          Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306),
          equation 8. z, the point of reference, estimates KL(pi || ref) and has no gradient.

Where preferences hardly contradict each other, DPO's loss pulls the policy away from the reference without an end; IPO
stops at the margin 1 / (2 beta). KTO needs no pairs, and so fits feedback such as a thumb up or down. One step:

    1. take groups of rollouts: its own (`tasks_per_step`, `group_size`), or those that a `source` paid for; or read
       `data`, pairs of texts or labelled ones, instead
    2. examples: pairs or labels, from the rewards of a group
    3. `epochs` passes over the examples, so many at a time
    4. publish the new weights

An update needs the ratios of all its rollouts at once, and their rows need not fit into one micro-batch. A first pass
without gradient gives the ratios, and `_judge` says -d loss / d r of each rollout; this factor then weights the tokens
of a second pass, whose loss is linear in log pi. That is exact and costs one more forward pass.

Deviations from the papers, and why:
- Preferences come from rewards, not from people. A group gives the best against the worst, or every pair, whose rewards
  differ by `min_gap` at least. For KTO a rollout is good if its reward is at least `good_from`; without that it is
  compared with the mean of its group, and has no label if it equals it.
- A rollout has several turns; observations between them are masked, because the policy did not write them.
- `reference = "behaviour"` takes the recorded log-probabilities of the sampler as the reference. No second model is
  held then, and the reference is the policy that acted. `"start"` is the papers': the policy when the algorithm began.
- The temperature that a call was sampled with is part of the policy here, in pi and in the reference.
- IPO takes r as a rollout's mean per token, as its authors advise and TRL computes it. With sums, a long rollout's
  margin is hundreds of nats off its target from the start.
- KTO's z is the mean of r over the update's rollouts, good and bad, at least 0. The paper pairs prompts with answers of
  other prompts, because its answers were not sampled from the policy; ours were, so their mean is the estimate itself.
  With a source of old rollouts it is that of the policy that acted, and with `data` of somebody else: more rough.
- KTO's paper sets the two weights by hand so that both kinds count about the same; `weights = "balanced"` takes them
  from their numbers in each step. A step with one kind only is not balanced.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.preparation import live_rows
from agl_algo_torch.data.supply import Age, RolloutSupply, Supplied
from agl_algo_torch.data.written_pairs import (
    WrittenAnswer,
    WrittenPair,
    check_ignored,
    check_source,
    read_answers,
    read_pairs,
    reading_notice,
)
from agl_algo_torch.learner.policy_learner import LearnerSettings, mean
from agl_algo_torch.learner.tuned_policy import TunedPolicy
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.reports import averaged
from agl_objectives.settings import Compute, Count, Lora, Optim, Positive, Saving
from agl_objectives.tasks import by_task
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Episode
    from agl_algo_torch.learner.batch import RowSample
    from agl_algo_torch.learner.policy_learner import PolicyLearner

ReferenceKind = Literal["start", "behaviour"]
Pairing = Literal["extremes", "all"]

MIN_GAP = 1e-6
"""Rewards that are no further apart are equal; above the rounding of their sums."""


def sigmoid(x: float) -> float:
    """Return the logistic function."""
    # Two forms of one function, each with an exponent that is never positive, so nothing overflows.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def dpo_loss(margin: float, *, beta: float) -> tuple[float, float]:
    """Return -log sigmoid(beta m) and -d loss / d m = beta sigmoid(-beta m), equation 7 of DPO's paper.

    The slope is near beta where the policy has the pair the wrong way round, and near 0 where it already prefers the
    chosen rollout clearly.
    """
    x = beta * margin
    # log sigmoid(x) = -log(1 + exp(-x)) = min(x, 0) - log(1 + exp(-|x|)), which loses no digits for large |x|.
    return math.log1p(math.exp(-abs(x))) - min(x, 0.0), beta * sigmoid(-x)


def ipo_loss(margin: float, *, beta: float) -> tuple[float, float]:
    """Return (m - 1 / (2 beta))^2 and -d loss / d m, equation 17 of IPO's paper; the margin is per token."""
    distance = margin - 1 / (2 * beta)
    return distance**2, -2 * distance


def kto_loss(ratio: float, *, point: float, is_good: bool, beta: float) -> tuple[float, float]:
    """Return 1 - sigmoid(+-beta (r - z)) and -d loss / d r, equation 8 of KTO's paper, for a weight of 1."""
    sign = 1.0 if is_good else -1.0
    value = sigmoid(beta * sign * (ratio - point))  # v, how much better than z the rollout is in the policy's eyes
    return 1.0 - value, sign * beta * value * (1.0 - value)  # the derivative of a sigmoid s is s (1 - s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The log-ratio of a rollout: its sum over the policy's tokens in nats, and how many these are."""

    total: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The slopes of the loss for the rollouts of one update, and the numbers to log.

    Attributes:
        factors: -d loss / d r by rollout, where r is the sum of its log-ratio and the loss the update's mean.
        metrics: Of the update, the loss included; every update has the same names.
    """

    factors: Mapping[str, float]
    metrics: dict[str, float]


class Example(Protocol):
    """Something to learn from, made of one rollout or more."""

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Ids of its rollouts."""
        ...


E = TypeVar("E", bound=Example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Generic[E]):
    """The examples of one step, and the rows that they are made of.

    Attributes:
        examples: Of rollouts, or of the texts that stand for them in `rows`.
        rows: The rows of all rollouts in examples.
        metrics: To log.
        trained: Ids of the rollouts that are trained.
        uses: What became of every call, by rollout id.
        stop_reason: Why no further step has examples; empty while one may.
    """

    examples: list[E]
    rows: list[RowSample]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    trained: tuple[str, ...] = ()
    uses: dict[str, tuple[CallUse, ...]] = field(default_factory=dict[str, "tuple[CallUse, ...]"])
    stop_reason: str = ""


class PreferenceAlgorithm(Supplied, ABC, Generic[E]):
    """One policy that learns from rollouts against a reference; subclasses choose the examples and judge them."""

    left_out: str
    """Why a rollout that is in no example teaches nothing."""

    def __init__(
        self,
        name: str,
        *,
        data: str,
        supply: RolloutSupply,
        reference: ReferenceKind,
        epochs: int,
        per_update: int,
        optim: Optim,
        lora: Lora,
        compute: Compute,
        saving: Saving,
        idle: Mapping[str, bool],
    ) -> None:
        """Take the settings; `idle` says for each other one that `data` would make idle if it is set."""
        ignored = {**supply.given, **idle, 'reference = "behaviour"': reference == "behaviour"}
        check_ignored(data, ignored, algorithm=name)
        self._data, self._supply = data, supply
        self._reference: ReferenceKind = reference
        self._epochs, self._per_update = epochs, per_update
        self._tuned = TunedPolicy(
            name,
            settings=LearnerSettings(optim=optim, lora=lora, compute=compute),
            saving=saving,
            has_reference=reference == "start",
        )

    @abstractmethod
    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[E]:
        """Return what the groups of a step teach; rollouts without a reward or without tokens teach nothing."""

    @abstractmethod
    def read(self, context: AlgorithmContext) -> int:
        """Read the examples of `data`; returns how many there are."""

    @abstractmethod
    def written(self, *, tokenizer: object, max_tokens: int) -> Gathered[E]:
        """Return the examples of `data`."""

    @abstractmethod
    def counts(self, examples: Sequence[E]) -> dict[str, float]:
        """Return how many examples of each kind a step has, as metrics."""

    @abstractmethod
    def sides(self, examples: Sequence[E]) -> dict[str, str]:
        """Return the part that each rollout takes in the examples, as text, by its id."""

    @abstractmethod
    def judge(self, examples: Sequence[E], ratios: Mapping[str, Ratio]) -> Judgement:
        """Return the loss of an update's examples and its slopes, given the ratios of their rollouts by id."""

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned, and where the examples come from."""
        self._context = context
        self._tuned.begin(context)
        if not self._data:
            self._supply.begin(context)
            return
        check_source(self._data, context.sources, algorithm=context.name)
        context.say(f"{context.name}: {reading_notice(self.read(context), self._data)}")

    async def step(self) -> StepReport:
        """Take groups, make examples, update, save and publish."""
        learner = await self._tuned.learner()
        moves = learner.moves

        # 1. and 2. Take groups, and make examples of them.
        given = await self._gather(self._tuned.step + 1, learner)

        # 3. Update.
        started = time.perf_counter()
        self._tuned.start_updates()
        metrics = given.metrics | self.counts(given.examples) | await self._train(learner, given.examples, given.rows)
        metrics["update_s"] = time.perf_counter() - started

        # 4. Make the new weights live; without an update they are what they were. Save them unless that may wait.
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        return StepReport(
            step=self._tuned.step,
            is_finished=bool(given.stop_reason),
            metrics=metrics,
            trained=given.trained,
            published=published,
            stop_reason=given.stop_reason,
            uses=given.uses,
        )

    async def _gather(self, step: int, learner: PolicyLearner) -> Gathered[E]:
        """Return the examples of `data` if there is one, else those of the groups of the supply."""
        if self._data:
            loaded = learner.loaded
            found = self.written(tokenizer=loaded.tokenizer, max_tokens=loaded.context_length)
            return replace(found, stop_reason=f"{step} steps done" if step >= self._supply.own_steps else "")
        given = await self._supply.take(step)
        examples = self.examples(given.groups)
        # A rollout may be in several examples, but its rows are built once.
        used = {rollout for example in examples for rollout in example.rollouts}
        episodes = [episode for group in given.groups for episode in group]
        rows = [row for e in episodes if e.rollout.rollout_id in used for row in live_rows(e)]
        return Gathered(
            examples=examples,
            rows=rows,
            metrics=given.metrics,
            trained=tuple(dict.fromkeys(row.rollout for row in rows)),
            uses=self._uses(episodes, self.sides(examples)),
            stop_reason=given.stop_reason,
        )

    def _uses(self, episodes: Sequence[Episode], sides: Mapping[str, str]) -> dict[str, tuple[CallUse, ...]]:
        """Return what became of every call, by rollout id."""
        uses: dict[str, tuple[CallUse, ...]] = {}
        for episode in episodes:
            rollout = episode.rollout.rollout_id
            live = {call.span_id for call in episode.transitions} if rollout in sides else ()
            uses[rollout] = call_uses(episode, trained=live, note=sides.get(rollout, ""), left_out=self.left_out)
        return uses

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of so many tasks a step draws, and how many times it runs each; none with `data`."""
        return (0, 0) if self._data else super().step_size(tasks)

    async def _train(self, learner: PolicyLearner, examples: list[E], rows: list[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates."""
        if not examples:
            return {"updates_skipped": 1.0}
        # log ref does not change while the policy does: one pass serves all epochs.
        reference = await asyncio.to_thread(self._reference_sums, learner, rows)
        by_rollout: defaultdict[str, list[RowSample]] = defaultdict(list)
        for row in rows:
            by_rollout[row.rollout].append(row)
        reports: list[dict[str, float]] = []
        for epoch in range(self._epochs):
            order = list(examples)
            # Seeded by what a resumed run knows too, so that it sees the examples in the same order.
            seed = f"{self._context.seed}/{self._context.name}/{self._tuned.step}/{epoch}"
            random.Random(seed).shuffle(order)
            for start in range(0, len(order), self._per_update):
                part = order[start : start + self._per_update]
                reports.append(await asyncio.to_thread(self._update, learner, part, by_rollout, reference))
                self._context.progress(epoch * len(order) + start + len(part), self._epochs * len(order), "update")
        return averaged(reports)

    def _reference_sums(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Return log ref(rollout) by rollout, in nats, before the step's first update."""
        if self._reference == "behaviour":
            # The sampler recorded log pi_behaviour of every token that it drew; the mask removes what it read.
            return _rollout_sums(rows, [row.behaviour * row.mask for row in rows])
        # The policy as it was when this algorithm began, asked about the same tokens at the same temperatures.
        with self._tuned.reference.active() as model:
            return _rollout_sums(rows, learner.logprobs(rows, model=model))

    def _update(
        self,
        learner: PolicyLearner,
        examples: Sequence[E],
        by_rollout: Mapping[str, Sequence[RowSample]],
        reference: Mapping[str, float],
    ) -> dict[str, float]:
        """Do one optimizer update on whole examples and return its metrics."""
        # Each rollout is run once, however many examples it is in.
        rollouts = dict.fromkeys(name for example in examples for name in example.rollouts)
        rows = [row for name in rollouts for row in by_rollout[name]]

        # First pass, without gradient: r = log pi - log ref of every rollout.
        policy = _rollout_sums(rows, learner.logprobs(rows))
        tokens = {name: sum(row.trained_tokens for row in by_rollout[name]) for name in rollouts}
        ratios = {name: Ratio(total=policy[name] - reference[name], tokens=tokens[name]) for name in rollouts}
        judgement = self.judge(examples, ratios)

        # Second pass: the loss sum_t -factor * log pi(y_t) is linear in log pi, and has the gradient of the loss.
        factored = [replace(row, advantages=row.mask * judgement.factors[row.rollout]) for row in rows]  # [T] per row
        for batch in learner.batches(factored, [1.0] * len(rows)):  # the mean over examples is in the factor
            backward(-(batch.advantages_M * batch.logprobs(learner.loaded.model)).sum())
        return learner.apply(judgement.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rollouts of one task by id; `chosen` has the higher reward."""

    chosen: str
    rejected: str

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Both."""
        return (self.chosen, self.rejected)


class DPO(PreferenceAlgorithm[Pair]):
    """Trains the weights of one policy on pairs of rollouts of one task, the better against the worse.

    Args:
        data: File of `{"prompt": [...], "chosen": [...], "rejected": [...]}` lines, relative to the experiment's file,
            as `agl data export --format dpo` writes them; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        beta: Strength of the reference: the inverse of how far the policy may go from it. `ipo` brings a pair to the
            margin 1 / (2 `beta`).
        min_gap: Least difference of two rewards that is a preference.
        pairs: `extremes` (one pair per group) or `all`.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's pairs; `pairs_per_update` make one optimizer update.
        optim: AdamW; the rate does not decay.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: Saved states of training.
    """

    name = "dpo"
    left_out = "its rollout is in no pair"

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        data: str = "",
        steps: Count | None = None,
        tasks_per_step: Count | None = None,
        group_size: Count | None = None,
        max_age: Age = -1,
        beta: Positive = 0.1,  # the default of DPO's paper
        min_gap: Positive = MIN_GAP,  # in the unit of the reward
        pairs: Pairing = "extremes",
        reference: ReferenceKind = "start",
        epochs: Count = 1,
        pairs_per_update: Count = 16,
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        if group_size == 1:
            raise ConfigError(f"{self.name} got group_size = 1; a pair needs a group of 2 at least.")
        self._beta, self._min_gap = beta, min_gap
        self._pairing: Pairing = pairs
        self._written: list[WrittenPair] = []
        super().__init__(
            self.name,
            data=data,
            supply=RolloutSupply(
                self.name, steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            reference=reference,
            epochs=epochs,
            per_update=pairs_per_update,
            optim=optim,
            lora=lora,
            compute=compute,
            saving=saving,
            idle={"min_gap": min_gap != MIN_GAP, "pairs": pairs != "extremes"},
        )

    def pair_loss(self, chosen: Ratio, rejected: Ratio) -> tuple[float, float, float, float]:
        """Return the margin and the loss of a pair, and -d loss / d r of its chosen and its rejected rollout."""
        margin = chosen.total - rejected.total  # m, in nats
        loss, slope = dpo_loss(margin, beta=self._beta)
        return margin, loss, slope, -slope

    def judge(self, examples: Sequence[Pair], ratios: Mapping[str, Ratio]) -> Judgement:
        """Average the pairs' losses."""
        margins: list[float] = []
        losses: list[float] = []
        factors: defaultdict[str, float] = defaultdict(float)  # adds up over the pairs that a rollout is in
        for pair in examples:
            margin, loss, up, down = self.pair_loss(ratios[pair.chosen], ratios[pair.rejected])
            margins.append(margin)
            losses.append(loss)
            factors[pair.chosen] += up / len(examples)
            factors[pair.rejected] += down / len(examples)
        metrics = {
            "loss": mean(losses),
            "margin": mean(margins),
            "accuracy": mean([float(margin > 0) for margin in margins]),  # pairs that the policy ranks as the rewards
        }
        return Judgement(factors=factors, metrics=metrics)

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Pair]:
        """Return the pairs of all groups, each of two answers to one task: with a `group_key` groups have several."""
        same = [rollouts for group in groups for rollouts in by_task(group).values()]
        return [pair for rollouts in same for pair in make_pairs(rollouts, gap=self._min_gap, pairing=self._pairing)]

    def read(self, context: AlgorithmContext) -> int:
        """Read the pairs of `data`."""
        self._written = read_pairs(context.folder / self._data)
        return len(self._written)

    def written(self, *, tokenizer: object, max_tokens: int) -> Gathered[Pair]:
        """Return the pairs of `data`."""
        rows = [row for pair in self._written for row in pair.rows(tokenizer=tokenizer, max_tokens=max_tokens)]
        pairs = [Pair(chosen=pair.chosen.where, rejected=pair.rejected.where) for pair in self._written]
        return Gathered(examples=pairs, rows=rows)

    def sides(self, examples: Sequence[Pair]) -> dict[str, str]:
        """Return how often each rollout is chosen and rejected."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for pair in examples:
            found[pair.chosen]["chosen"] += 1
            found[pair.rejected]["rejected"] += 1
        return {
            rollout: ", ".join(f"{name} in {count} pairs" for name, count in counted.items())
            for rollout, counted in found.items()
        }

    def counts(self, examples: Sequence[Pair]) -> dict[str, float]:
        """Count the pairs."""
        return {"pairs": float(len(examples))}


class IPO(DPO):
    """Trains the weights of one policy on pairs of rollouts of one task, towards a margin of a certain size.

    Its settings are those of `dpo`.
    """

    name = "ipo"

    def pair_loss(self, chosen: Ratio, rejected: Ratio) -> tuple[float, float, float, float]:
        """Return the margin per token and the loss of a pair, and -d loss / d r of its two rollouts."""
        margin = chosen.total / chosen.tokens - rejected.total / rejected.tokens
        loss, slope = ipo_loss(margin, beta=self._beta)
        return margin, loss, slope / chosen.tokens, -slope / rejected.tokens  # dm / dr = 1 / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A rollout by id, whether it is good, and how much it counts."""

    rollout: str
    is_good: bool
    weight: float

    @property
    def rollouts(self) -> tuple[str, ...]:
        """The one."""
        return (self.rollout,)


class KTO(PreferenceAlgorithm[Label]):
    """Trains the weights of one policy on rollouts that are good or bad by themselves.

    Args:
        data: File of `{"prompt": [...], "completion": [...], "label": true}` lines, relative to the experiment's file,
            or of pairs as for `dpo`, each a good and a bad answer; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        good_from: Least reward of a good rollout; by default the mean of its group, which it must differ from.
        beta: Strength of the reference: the inverse of how far the policy may go from it.
        weights: How much a good and a bad rollout count; `balanced` lets the rarer kind of a step count for more, so
            that both kinds weigh the same.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's rollouts; `rollouts_per_update` make one optimizer update.
        optim: AdamW; the rate does not decay.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: Saved states of training.
    """

    left_out = "its rollout is neither good nor bad"

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        data: str = "",
        steps: Count | None = None,
        tasks_per_step: Count | None = None,
        group_size: Count | None = None,
        max_age: Age = -1,
        good_from: float | None = None,
        beta: Positive = 0.1,  # the paper's default
        weights: Literal["balanced"] | tuple[Positive, Positive] = "balanced",
        reference: ReferenceKind = "start",
        epochs: Count = 1,
        rollouts_per_update: Count = 32,
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        if group_size == 1 and good_from is None:
            raise ConfigError(
                "kto got group_size = 1 without good_from; a rollout that is alone in its group has nothing to be "
                "compared with. Set good_from to the least reward of a good rollout, or use a larger group."
            )
        self._good_from, self._beta, self._weights = good_from, beta, weights
        self._written: list[WrittenAnswer] = []
        super().__init__(
            "kto",
            data=data,
            supply=RolloutSupply(
                "kto", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            reference=reference,
            epochs=epochs,
            per_update=rollouts_per_update,
            optim=optim,
            lora=lora,
            compute=compute,
            saving=saving,
            idle={"good_from": good_from is not None},
        )

    def judge(self, examples: Sequence[Label], ratios: Mapping[str, Ratio]) -> Judgement:
        """Average the weighted losses of the labelled rollouts."""
        point = max(0.0, mean([ratio.total for ratio in ratios.values()]))  # z, at least 0 as a divergence is
        losses: list[float] = []
        factors: dict[str, float] = {}
        totals: dict[bool, list[float]] = {True: [], False: []}
        for label in examples:
            total = ratios[label.rollout].total
            loss, slope = kto_loss(total, point=point, is_good=label.is_good, beta=self._beta)
            losses.append(label.weight * loss)
            factors[label.rollout] = label.weight * slope / len(examples)
            totals[label.is_good].append(total)
        margin = mean(totals[True]) - mean(totals[False]) if totals[True] and totals[False] else 0.0
        return Judgement(factors=factors, metrics={"loss": mean(losses), "margin": margin, "reference_kl": point})

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Label]:
        """Return the labels of all rollouts that are good or bad."""
        return self._weighed([label for group in groups for label in self._labels(group)])

    def _labels(self, group: Sequence[Episode]) -> list[tuple[str, bool]]:
        """Return the ids of a group's rollouts that have a label, and whether they are good."""
        rewards = {e.rollout.rollout_id: e.reward for e in group if can_teach(e) and e.reward is not None}
        if self._good_from is not None:
            return [(name, reward >= self._good_from) for name, reward in rewards.items()]
        middle = mean(list(rewards.values()))
        return [(name, reward > middle) for name, reward in rewards.items() if abs(reward - middle) > MIN_GAP]

    def _weighed(self, found: Sequence[tuple[str, bool]]) -> list[Label]:
        """Return labels with their weights, lambda_D of the good and lambda_U of the bad ones."""
        counts = Counter(is_good for _, is_good in found)
        if isinstance(self._weights, tuple):
            weights = {True: self._weights[0], False: self._weights[1]}
        else:
            # Of n rollouts, g good: the good ones count n / 2g each and the bad ones n / 2(n - g).
            weights = {kind: len(found) / (2 * count) if len(counts) > 1 else 1.0 for kind, count in counts.items()}
        return [Label(rollout=rollout, is_good=is_good, weight=weights[is_good]) for rollout, is_good in found]

    def read(self, context: AlgorithmContext) -> int:
        """Read the answers of `data`."""
        self._written = read_answers(context.folder / self._data)
        return len(self._written)

    def written(self, *, tokenizer: object, max_tokens: int) -> Gathered[Label]:
        """Return the labels of `data`."""
        rows = [row for answer in self._written for row in answer.rows(tokenizer=tokenizer, max_tokens=max_tokens)]
        labels = self._weighed([(answer.dialogue.where, answer.is_good) for answer in self._written])
        return Gathered(examples=labels, rows=rows)

    def counts(self, examples: Sequence[Label]) -> dict[str, float]:
        """Count the good and the bad rollouts."""
        good = sum(label.is_good for label in examples)
        return {"good": float(good), "bad": float(len(examples) - good)}

    def sides(self, examples: Sequence[Label]) -> dict[str, str]:
        """Return whether each rollout is good or bad, and how much it counts."""
        return {label.rollout: f"{'good' if label.is_good else 'bad'}, counts {label.weight:.3g}" for label in examples}


def can_teach(episode: Episode) -> bool:
    """Return true for an episode that has a reward and tokens of the policy."""
    return episode.reward is not None and any(any(row.mask) for row in episode.rows)


def make_pairs(group: Sequence[Episode], *, gap: float, pairing: Pairing) -> list[Pair]:
    """Return the pairs of a group, best rollouts first; of equal rewards the earlier rollout comes first.

    Only rollouts with a reward and with tokens of the policy take part. `extremes` gives one pair at most. A group of
    one rollout, or one whose rewards differ by less than `gap`, gives none.
    """
    # `reward or 0.0` is for the type checker: rollouts without a reward are filtered out here.
    ranked = sorted(filter(can_teach, group), key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id))
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


def _rollout_sums(rows: Sequence[RowSample], values: Sequence[Tensor]) -> dict[str, float]:
    """Return the sum of `values` ([T] per row, 0 outside of the mask) over all rows of each rollout."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row, value in zip(rows, values, strict=True):
        # A row's first token is never predicted, so it must not count on the reference's side alone.
        # float64: a ratio is a small difference of sums over thousands of tokens.
        sums[row.rollout] += float(value[1:].double().sum())
    return dict(sums)
