"""DPO, IPO and KTO: learn from preferences between finished rollouts; the updates sample nothing.

All three compare the policy with a reference policy by the log-ratio of whole rollouts,

    r = log pi(rollout) - log ref(rollout),   log pi(rollout) = sum over the policy's tokens in all turns and rows

They differ in the loss, which is a function of r. Of two rollouts of one task, w is the chosen and l the rejected one;
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

Where preferences hardly contradict each other, DPO's loss pulls the policy away from the reference without limit; IPO
stops at the margin 1 / (2 beta). KTO needs no pairs, and so fits feedback such as a thumb up or down. One step:

    1. collect groups of rollouts (`tasks_per_step`, `group_size`), take the groups of a `source`, or read `data`: a
       file of pairs of texts, or of texts with labels
    2. make examples from the rewards of each group: pairs for DPO and IPO, labels for KTO
    3. `epochs` passes over the examples; an update takes `pairs_per_update` or `rollouts_per_update` of them
    4. publish the new weights

An update needs the ratios of all its rollouts at once, but the rows of all these rollouts may not fit into one
micro-batch. A first pass without gradient therefore gives the ratios, and `judge` returns -d loss / d r of each
rollout. A second pass weights the tokens of each rollout by this factor; its loss is linear in log pi. The gradient is
exact and costs one more forward pass.

Deviations from the papers, and why:
- Preferences come from rewards, not from people. A group gives one pair, its best rollout against its worst, or all its
  pairs (`pairs`); the rewards of a pair differ by at least `min_gap`. For KTO a rollout is good if its reward is at
  least `good_from`. Without `good_from` a reward above the mean of the group is good, a lower one bad, and a reward
  equal to the mean gives no label.
- A rollout has several turns; observations between them are masked, because the policy did not write them.
- `reference = "behaviour"` takes the recorded log-probabilities of the sampler as the reference. The reference is then
  the policy that acted, and no second model is in memory. `"start"` is the papers' reference: the policy when the
  algorithm began.
- Both pi and the reference are taken at the temperature that a call was sampled with.
- IPO divides r by the rollout's number of tokens, as its authors advise and as TRL does. With sums, the margin of a
  long rollout would be hundreds of nats from its target at the start.
- KTO's z is the mean of r over all rollouts of the update, good and bad, but at least 0. The paper pairs prompts with
  the answers of other prompts, because its answers were not sampled from the policy. Ours were, so the mean of r
  estimates the KL directly. The estimate is rougher with a source, whose rollouts an older policy may have sampled, and
  with `data`, which the policy did not write.
- KTO's paper sets the two weights by hand so that good and bad examples count about the same; `weights = "balanced"`
  computes them in each step from the numbers of good and of bad examples. A step with only one kind has weights of 1.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.credited_rows import live_rows
from agl_algo_torch.data.dialogues import WrittenExample, read_answers, read_pairs
from agl_algo_torch.data.supply import Age, RolloutSupply, Supplied, SuppliedGroups
from agl_algo_torch.learner.policy_learner import LearnerSettings, mean
from agl_algo_torch.learner.tuned_policy import TunedPolicy
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.reports import averaged
from agl_objectives.settings import Compute, Count, Lora, Optim, Positive, Saving
from agl_objectives.tasks import by_task
from agl_objectives.uses import rollout_uses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode
    from agl_algo_torch.learner.batch import RowSample
    from agl_algo_torch.learner.policy_learner import PolicyLearner

ReferenceKind = Literal["start", "behaviour"]
Pairing = Literal["extremes", "all"]

MIN_GAP = 1e-6
"""Rewards whose difference is smaller than this count as equal: rounding in a sum may cause such a difference."""


def sigmoid(x: float) -> float:
    """Return the logistic function."""
    # Two forms of one function, each with an exponent that is never positive, so nothing overflows.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def dpo_loss(margin: float, *, beta: float) -> tuple[float, float]:
    """Return -log sigmoid(beta m) and -d loss / d m = beta sigmoid(-beta m), equation 7 of DPO's paper."""
    # Bradley and Terry: w beats l with the probability sigmoid(reward(w) - reward(l)). The policy that is optimal under
    # a KL penalty beta has reward = beta log(pi / pi_ref) + const, so beta m is the difference of the implicit rewards,
    # and the loss the negative log-likelihood of the preference.
    x = beta * margin
    # log sigmoid(x) = -log(1 + exp(-x)) = min(x, 0) - log(1 + exp(-|x|)), which loses no digits for large |x|.
    loss = math.log1p(math.exp(-abs(x))) - min(x, 0.0)
    # The slope is near beta where the policy has the pair the wrong way round, and near 0 where it already prefers w
    # clearly: the paper's weight sigmoid(rhat(l) - rhat(w)), below its equation 7.
    return loss, beta * sigmoid(-x)


def ipo_loss(margin: float, *, beta: float) -> tuple[float, float]:
    """Return (m - 1 / (2 beta))^2 and -d loss / d m, equation 17 of IPO's paper; the margin is per token."""
    # A regression of m (the paper's h_pi) on 1 / (2 tau): beyond that margin the slope turns negative and pulls the
    # policy back, where DPO's would go on pushing.
    distance = margin - 1 / (2 * beta)
    return distance**2, -2 * distance


def kto_loss(ratio: float, *, point: float, is_good: bool, beta: float) -> tuple[float, float]:
    """Return 1 - sigmoid(+-beta (r - z)) and -d loss / d r, equation 8 of KTO's paper, for a weight of 1."""
    # Prospect theory: an outcome is a gain or a loss relative to a point of reference z, and each further gain counts
    # for less. v is the paper's value of the rollout, and 1 - v what lambda_D or lambda_U weights.
    sign = 1.0 if is_good else -1.0
    value = sigmoid(beta * sign * (ratio - point))
    # The derivative of a sigmoid s is s (1 - s): rollouts far from z on either side hardly move.
    return 1.0 - value, sign * beta * value * (1.0 - value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The log-ratio r of a rollout, in nats, summed over the policy's tokens, and the number of those tokens."""

    total: float  # r = log pi(rollout) - log ref(rollout)
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A pair of rollouts of one task, or a single rollout that is good or bad.

    Attributes:
        chosen: Id of the pair's rollout with the higher reward, or of the single good rollout; else empty.
        rejected: Id of the pair's rollout with the lower reward, or of the single bad rollout; else empty.
        weight: Factor of the example's loss in the mean over an update; 1 for a pair.
    """

    chosen: str = ""  # w
    rejected: str = ""  # l
    weight: float = 1.0  # lambda_D or lambda_U of KTO

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Ids of the example's one or two rollouts, the chosen one first."""
        return tuple(filter(None, (self.chosen, self.rejected)))


Judgement = tuple["Mapping[str, float]", dict[str, float]]
"""The slopes by rollout id, and the metrics of an update.

A slope is -d loss / d r, where the loss is the update's mean loss and r the rollout's log-ratio.
"""


class PreferenceAlgorithm(Supplied, ABC):
    """Base of the algorithms that train on preferences; a subclass makes the examples and computes the loss."""

    name: ClassVar[str]
    left_out: ClassVar[str]
    """Text that says why a rollout that is in no example teaches nothing."""
    read: ClassVar[Callable[[Path], list[WrittenExample]]]
    """Reads the examples in the file `data`."""

    def __init__(
        self,
        *,
        data: str,
        supply: RolloutSupply,
        reference: ReferenceKind,
        epochs: int,
        per_update: int,
        settings: LearnerSettings,
        saving: Saving,
        idle: Mapping[str, bool],
    ) -> None:
        """Store the settings; `idle` maps each further setting that has no effect with `data` to whether it is set.

        Raises ConfigError if `data` is given together with a setting that would then have no effect.
        """
        # Texts of a file have no rewards to compare, no groups, and no recorded log-probabilities.
        ignored = {**supply.given, **idle, 'reference = "behaviour"': reference == "behaviour"}
        if data and any(ignored.values()):
            raise ConfigError(
                f"{self.name} reads what it learns from in data = {data!r}, so "
                f"{', '.join(name for name, is_set in ignored.items() if is_set)} would be ignored; remove that, or "
                "remove data."
            )
        self._data, self._supply, self._written = data, supply, list[WrittenExample]()
        self._reference: ReferenceKind = reference
        self._epochs, self._per_update = epochs, per_update
        self._tuned = TunedPolicy(self.name, settings=settings, saving=saving, has_reference=reference == "start")

    @abstractmethod
    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Example]:
        """Return the examples made of a step's groups; rollouts without a reward or trained tokens are left out."""

    @abstractmethod
    def judge(self, examples: Sequence[Example], ratios: Mapping[str, Ratio]) -> Judgement:
        """Return the slopes of an update's mean loss, and metrics that include the loss; `ratios` is by rollout id."""

    @abstractmethod
    def counts(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return metrics with the number of a step's examples of each kind."""

    @abstractmethod
    def notes(self, examples: Sequence[Example]) -> dict[str, str]:
        """Return, by rollout id, a note on the examples that contain the rollout."""

    def weighed(self, examples: list[Example]) -> list[Example]:
        """Return a step's examples with their weights set; by default every weight is 1."""
        return examples

    async def setup(self, context: AlgorithmContext) -> None:
        """Read `data`, or prepare the rollout supply.

        Raises ConfigError unless exactly one policy is tuned and its weights can be trained in this process; also if
        there is both `data` and a source.
        """
        self._context = context
        reading = self._tuned.begin(context)
        if not self._data:
            self._supply.begin(reading)
            return
        if context.sources:
            raise ConfigError(
                f"{context.name} reads what it learns from in data = {self._data!r}, so the source "
                f"{list(context.sources)} would be ignored; remove one of them."
            )
        self._written = type(self).read(context.folder / self._data)
        context.say(
            f"{len(self._written)} examples of text in {self._data}; their token ids come from the policy's tokenizer "
            "and chat template, because the sampled ones were not recorded"
        )

    async def step(self) -> StepReport:
        """Take groups, make examples, update, save and publish."""
        learner = await self._tuned.learner()
        moves = learner.moves

        # 1. and 2. Take groups, and make examples of them.
        # The papers' data set D of (x, y_w, y_l), or of (x, y) with a label: x is the task, y what the policy wrote.
        given, examples, rows = await self._gather(self._tuned.step + 1, learner)
        trained = dict.fromkeys(row.rollout for row in rows) if given.groups else ()
        # A rollout trains as a whole, all its calls with one factor.
        uses = rollout_uses(given.episodes, self.notes(examples), left_out=self.left_out)

        # 3. Update.
        started = time.perf_counter()
        self._tuned.start_updates()
        metrics = given.metrics | self.counts(examples) | await self._train(learner, examples, rows)
        metrics["update_s"] = time.perf_counter() - started

        # 4. Publish the new weights, if there was an update. Save a state of training, unless saving is deferred.
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        return StepReport(
            step=self._tuned.step,
            is_finished=bool(given.stop_reason),
            metrics=metrics,
            trained=tuple(trained),
            published=published,
            stop_reason=given.stop_reason,
            uses=uses,
        )

    async def _gather(self, step: int, learner: PolicyLearner) -> tuple[SuppliedGroups, list[Example], list[RowSample]]:
        """Return a step's groups (empty with `data`), its examples, and the rows of all rollouts in the examples."""
        if self._data:
            loaded = learner.loaded
            rows = [
                row
                for one in self._written
                for row in one.rows(
                    tokenizer=loaded.tokenizer,
                    max_tokens=loaded.context_length,
                    stop_ids=loaded.stop_ids,
                    modality=loaded.modality,
                )
            ]
            reason = f"reached steps = {step}" if step >= self._supply.own_steps else ""
            # A text has no rollout id; its file and line stand in for one.
            examples = [Example(chosen=one.where("chosen"), rejected=one.where("rejected")) for one in self._written]
            return SuppliedGroups(groups=[], metrics={}, stop_reason=reason), self.weighed(examples), rows
        given = await self._supply.take(step)
        examples = self.weighed(self.examples(given.groups))
        # A rollout may be in several examples, but its rows are built once.
        used = {rollout for example in examples for rollout in example.rollouts}
        pictures = self._tuned.pictures
        rows = [row for e in given.episodes if e.rollout.rollout_id in used for row in live_rows(e, pictures=pictures)]
        return given, examples, rows

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of `tasks` tasks a step draws, and how many rollouts per task; (0, 0) with `data`."""
        return (0, 0) if self._data else super().step_size(tasks)

    async def _train(self, learner: PolicyLearner, examples: list[Example], rows: list[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates."""
        if not examples:
            return {"updates_skipped": 1.0}
        # log pi_ref(y | x) does not change while the policy does: one pass serves all epochs.
        reference = await asyncio.to_thread(self._reference_sums, learner, rows)
        by_rollout: defaultdict[str, list[RowSample]] = defaultdict(list)
        for row in rows:
            by_rollout[row.rollout].append(row)
        # The expectation over D as means over shuffled parts of it, one update each; an example is never cut.
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
        """Return log ref(rollout) in nats, by rollout id; the values hold for all updates of a step."""
        if self._reference == "behaviour":
            # The sampler recorded log pi_behaviour of every token that it drew; the mask removes what it read.
            return _rollout_sums(rows, [row.behaviour * row.mask for row in rows])
        # pi_ref: the policy as it was when this algorithm began, asked about the same tokens at the same temperatures.
        with self._tuned.reference.active() as model:
            return _rollout_sums(rows, learner.logprobs(rows, model=model))

    def _update(
        self,
        learner: PolicyLearner,
        examples: Sequence[Example],
        by_rollout: Mapping[str, Sequence[RowSample]],
        reference: Mapping[str, float],
    ) -> dict[str, float]:
        """Do one optimizer update on whole examples and return its metrics."""
        # Each rollout is run once, however many examples it is in.
        rollouts = dict.fromkeys(name for example in examples for name in example.rollouts)
        rows = [row for name in rollouts for row in by_rollout[name]]

        # First pass, without gradient: r = log pi_theta - log pi_ref of every rollout. The loss of an example is a
        # function of the r of its rollouts alone, so with r known each rollout's slope -d loss / d r is a number.
        policy = _rollout_sums(rows, learner.logprobs(rows))
        tokens = {name: sum(row.trained_tokens for row in by_rollout[name]) for name in rollouts}
        ratios = {name: Ratio(total=policy[name] - reference[name], tokens=tokens[name]) for name in rollouts}
        factors, metrics = self.judge(examples, ratios)

        # Second pass. By the chain rule
        #     grad loss = sum_rollouts (d loss / d r) grad r = -sum_t factor(rollout of t) grad log pi_theta(y_t),
        # for pi_ref has no gradient. The surrogate -sum_t factor log pi_theta(y_t) has this very gradient and is a sum
        # over tokens, so micro-batches may cut it anywhere.
        factored = [replace(row, advantages=row.mask * factors[row.rollout]) for row in rows]  # [T] per row
        for batch in learner.batches(factored, [1.0] * len(rows)):  # the mean over examples is in the factor
            backward(-(batch.advantages_M * batch.logprobs(learner.loaded.model)).sum())
        return learner.apply(metrics)


class DPO(PreferenceAlgorithm):
    """Trains the weights of one policy on pairs of rollouts of one task, the better against the worse.

    Args:
        data: Path of a JSON-lines file, relative to the experiment's file. Each line is `{"prompt": [...], "chosen":
            [...], "rejected": [...]}`, as `agl data export --format dpo` writes it. Each step learns from the whole
            file. Leave it empty to learn from rollouts.
        steps: Number of steps; 1 by default. With a source, an upper limit; without `steps`, the algorithm then
            continues until the source has no more rollouts.
        tasks_per_step: Groups per step, by default 16; refused with a source, which brings its own groups.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, how many versions of the tuned policy a rollout may be behind; -1 for no limit.
        beta: Strength of the pull towards the reference: the larger, the less the policy moves away from it. `ipo`
            brings a pair to the margin 1 / (2 `beta`).
        min_gap: Smallest difference of two rewards that makes a pair.
        pairs: `extremes` (the best and the worst rollout of a group make one pair) or `all`.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's pairs.
        pairs_per_update: Pairs of one optimizer update.
        optim: AdamW; `decay` is refused.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    name = "dpo"
    left_out = "its rollout is in no pair"
    read = read_pairs

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
        reference: ReferenceKind = "start",  # pi_ref of the paper
        epochs: Count = 1,
        pairs_per_update: Count = 16,
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        if group_size == 1:
            raise ConfigError(f"{self.name} got group_size = 1; a pair needs a group of 2 at least.")
        # beta: 1 / how far pi_theta may go from pi_ref, as the weight of KL(pi_theta || pi_ref) in the RL objective
        # that DPO solves (equation 3 of its paper).
        self._beta, self._min_gap = beta, min_gap
        self._pairing: Pairing = pairs
        super().__init__(
            data=data,
            supply=RolloutSupply(
                self.name, steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            reference=reference,
            epochs=epochs,
            per_update=pairs_per_update,
            settings=LearnerSettings(optim=optim, lora=lora, compute=compute),
            saving=saving,
            idle={"min_gap": min_gap != MIN_GAP, "pairs": pairs != "extremes"},
        )

    def pair_loss(self, chosen: Ratio, rejected: Ratio) -> tuple[float, float, float, float]:
        """Return the margin of a pair, its loss, and -d loss / d r of the chosen and of the rejected rollout."""
        margin = chosen.total - rejected.total  # m = r(w) - r(l), in nats
        loss, slope = dpo_loss(margin, beta=self._beta)
        return margin, loss, slope, -slope  # dm / dr is 1 for w and -1 for l

    def judge(self, examples: Sequence[Example], ratios: Mapping[str, Ratio]) -> Judgement:
        """Return the slopes of the pairs' mean loss, and its metrics."""
        margins: list[float] = []
        losses: list[float] = []
        factors: defaultdict[str, float] = defaultdict(float)  # adds up over the pairs that a rollout is in
        for pair in examples:
            # up = -d loss / d r(w) raises log pi(y_w), down = -d loss / d r(l) = -up lowers log pi(y_l).
            margin, loss, up, down = self.pair_loss(ratios[pair.chosen], ratios[pair.rejected])
            margins.append(margin)
            losses.append(loss)
            factors[pair.chosen] += up / len(examples)
            factors[pair.rejected] += down / len(examples)
        # The share of pairs that the policy ranks as their rewards do.
        accuracy = mean([float(margin > 0) for margin in margins])
        return factors, {"loss": mean(losses), "margin": mean(margins), "accuracy": accuracy}

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Example]:
        """Return the pairs of all groups; the two rollouts of a pair have the same task."""
        # A pair is two answers to one task. With a `group_key` a group has several tasks, and the policy's chances of
        # answers to different prompts do not compare.
        same = [rollouts for group in groups for rollouts in by_task(group).values()]
        return [pair for rollouts in same for pair in make_pairs(rollouts, gap=self._min_gap, pairing=self._pairing)]

    def notes(self, examples: Sequence[Example]) -> dict[str, str]:
        """Return, by rollout id, in how many pairs the rollout is chosen and rejected."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for pair in examples:
            found[pair.chosen]["chosen"] += 1
            found[pair.rejected]["rejected"] += 1
        return {
            rollout: ", ".join(f"{name} in {count} of the pairs" for name, count in counted.items())
            for rollout, counted in found.items()
        }

    def counts(self, examples: Sequence[Example]) -> dict[str, float]:
        """Count the pairs."""
        return {"pairs": float(len(examples))}


class IPO(DPO):
    """Trains the weights of one policy on pairs of rollouts of one task, until their margin is 1 / (2 `beta`).

    The settings are those of `dpo`.
    """

    name = "ipo"

    def pair_loss(self, chosen: Ratio, rejected: Ratio) -> tuple[float, float, float, float]:
        """Return the margin of a pair per token, its loss, and -d loss / d r of the chosen and the rejected rollout."""
        # h_pi of the paper, with r as the mean per token: m = r(w) / |w| - r(l) / |l|.
        margin = chosen.total / chosen.tokens - rejected.total / rejected.tokens
        # tau of the paper is beta here, the weight of KL(pi_theta || pi_ref) as for DPO.
        loss, slope = ipo_loss(margin, beta=self._beta)
        return margin, loss, slope / chosen.tokens, -slope / rejected.tokens  # dm / dr = 1 / tokens


class KTO(PreferenceAlgorithm):
    """Trains the weights of one policy on rollouts that are good or bad by themselves.

    Args:
        data: Path of a JSON-lines file, relative to the experiment's file. Each line is `{"prompt": [...],
            "completion": [...], "label": true}`, or a pair as for `dpo`, which counts as one good and one bad answer.
            Each step learns from the whole file. Leave it empty to learn from rollouts.
        steps: Number of steps; 1 by default. With a source, an upper limit; without `steps`, the algorithm then
            continues until the source has no more rollouts.
        tasks_per_step: Groups per step, by default 16; refused with a source, which brings its own groups.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, how many versions of the tuned policy a rollout may be behind; -1 for no limit.
        good_from: Smallest reward of a good rollout; a rollout with less is bad. By default each reward is compared
            with the mean of its group, and a reward equal to the mean teaches nothing.
        beta: Strength of the pull towards the reference: the larger, the less the policy moves away from it.
        weights: Weights of a good and of a bad rollout. With `balanced`, they are set in each step so that all good
            rollouts together count as much as all bad ones.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's rollouts.
        rollouts_per_update: Rollouts of one optimizer update.
        optim: AdamW; `decay` is refused.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    name = "kto"
    left_out = "its rollout is neither good nor bad"
    read = read_answers

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
        weights: Literal["balanced"] | tuple[Positive, Positive] = "balanced",  # lambda_D and lambda_U
        reference: ReferenceKind = "start",  # pi_ref of the paper
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
        # beta scales r - z: how fast the value saturates, which is the paper's risk aversion.
        self._good_from, self._beta, self._weights = good_from, beta, weights
        super().__init__(
            data=data,
            supply=RolloutSupply(
                "kto", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            reference=reference,
            epochs=epochs,
            per_update=rollouts_per_update,
            settings=LearnerSettings(optim=optim, lora=lora, compute=compute),
            saving=saving,
            idle={"good_from": good_from is not None},
        )

    def judge(self, examples: Sequence[Example], ratios: Mapping[str, Ratio]) -> Judgement:
        """Return the slopes of the weighted mean loss of the labelled rollouts, and its metrics."""
        # z estimates KL(pi || pi_ref): the mean of r over rollouts of the policy, at least 0 as a divergence is. It is
        # data here, without gradient, as in the paper.
        point = max(0.0, mean([ratio.total for ratio in ratios.values()]))
        losses: list[float] = []
        # -d loss / d r, averaged over the examples: lambda beta v (1 - v), positive for good rollouts.
        factors: dict[str, float] = {}
        totals: dict[bool, list[float]] = {True: [], False: []}
        for label in examples:
            (rollout,), is_good = label.rollouts, bool(label.chosen)
            total = ratios[rollout].total
            loss, slope = kto_loss(total, point=point, is_good=is_good, beta=self._beta)
            losses.append(label.weight * loss)  # lambda_y - v(x, y), up to a constant
            factors[rollout] = label.weight * slope / len(examples)
            totals[is_good].append(total)
        # Not in the paper: r(good) - r(bad) on average, to be read next to DPO's margin.
        margin = mean(totals[True]) - mean(totals[False]) if totals[True] and totals[False] else 0.0
        return factors, {"loss": mean(losses), "margin": margin, "reference_kl": point}

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Example]:
        """Return one example for each rollout that counts as good or bad."""
        found: list[Example] = []
        for group in groups:
            rewards = {e.rollout.rollout_id: e.reward for e in group if _can_teach(e) and e.reward is not None}
            middle = mean(list(rewards.values()))
            for name, reward in rewards.items():
                # y is desirable where its reward is high, by a bound or by comparison with its siblings.
                is_good = reward > middle if self._good_from is None else reward >= self._good_from
                # A rollout with the mean reward of its group is neither good nor bad.
                if self._good_from is not None or abs(reward - middle) > MIN_GAP:
                    found.append(Example(chosen=name) if is_good else Example(rejected=name))
        return found

    def weighed(self, examples: list[Example]) -> list[Example]:
        """Return the labelled rollouts with their weights: lambda_D for a good one, lambda_U for a bad one."""
        counts = Counter(bool(label.chosen) for label in examples)
        # The paper advises lambda_D n_good / (lambda_U n_bad) from 1 to 4/3; balanced weights make it 1.
        if isinstance(self._weights, tuple):
            weights = {True: self._weights[0], False: self._weights[1]}
        else:
            # Of n rollouts, g good: the good ones count n / 2g each and the bad ones n / 2(n - g).
            weights = {kind: len(examples) / (2 * count) if len(counts) > 1 else 1.0 for kind, count in counts.items()}
        return [replace(label, weight=weights[bool(label.chosen)]) for label in examples]

    def counts(self, examples: Sequence[Example]) -> dict[str, float]:
        """Count the good and the bad rollouts."""
        good = sum(bool(label.chosen) for label in examples)
        return {"good": float(good), "bad": float(len(examples) - good)}

    def notes(self, examples: Sequence[Example]) -> dict[str, str]:
        """Return, by rollout id, whether the rollout counts as good or bad, and its weight."""
        return {
            label.rollouts[0]: f"{'good' if label.chosen else 'bad'}, counts {label.weight:.3g}" for label in examples
        }


def _can_teach(episode: Episode) -> bool:
    """Return true if the episode has a reward and tokens that the policy wrote."""
    return episode.reward is not None and any(any(row.mask) for row in episode.rows)


def make_pairs(group: Sequence[Episode], *, gap: float, pairing: Pairing) -> list[Example]:
    """Return the pairs of a group in the order of their chosen rollouts: the highest reward, then the lowest id first.

    Only rollouts with a reward and with tokens of the policy take part. The rewards of a pair differ by at least `gap`.
    `extremes` gives at most one pair. A group of one rollout gives no pair.
    """
    # `reward or 0.0` is for the type checker: rollouts without a reward are filtered out here.
    ranked = sorted(filter(_can_teach, group), key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id))
    found = [
        Example(chosen=better.rollout.rollout_id, rejected=worse.rollout.rollout_id)
        for index, better in enumerate(ranked)
        for worse in ranked[index + 1 :]
        if (better.reward or 0.0) - (worse.reward or 0.0) >= gap
    ]
    if pairing == "all" or not found:
        return found
    # (y_w, y_l) of the task: best against worst has the largest gap of the group, and one pair lets every task count
    # the same.
    return [Example(chosen=ranked[0].rollout.rollout_id, rejected=ranked[-1].rollout.rollout_id)]


def _rollout_sums(rows: Sequence[RowSample], values: Sequence[Tensor]) -> dict[str, float]:
    """Return the sum of `values`, one [T] per row and 0 outside its mask, over each rollout's rows, by rollout id."""
    # log pi(rollout) = sum over its turns and tokens of log pi(y_t | everything before y_t), in however many rows.
    sums: defaultdict[str, float] = defaultdict(float)
    for row, value in zip(rows, values, strict=True):
        # A row's first token is never predicted, so it must not count on the reference's side alone.
        # float64: a ratio is a small difference of sums over thousands of tokens.
        sums[row.rollout] += float(value[1:].double().sum())
    return dict(sums)
