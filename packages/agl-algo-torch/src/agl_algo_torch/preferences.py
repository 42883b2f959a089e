"""Trains a policy by the log-ratios of whole rollouts to a reference policy, for `dpo`, `ipo` and `kto`.

The log-ratio of a rollout is r = log pi(rollout) - log ref(rollout), where log pi(rollout) sums over the policy's
tokens of all its turns and rows. One step:

    1. take groups of rollouts: its own (`tasks_per_step`, `group_size`), or those that a `source` paid for; or read
       `data`, pairs of texts or labelled ones, instead
    2. examples: what the algorithm makes of the rewards, such as pairs or labels
    3. `epochs` passes over the examples, so many at a time
    4. publish the new weights

An update needs the ratios of all its rollouts at once, and their rows need not fit into one micro-batch. A first pass
without gradient gives the ratios, and the algorithm says -d loss / d r of each rollout; this factor then weights the
tokens of a second pass, whose loss is linear in log pi. That is exact and costs one more forward pass.

Deviations from the papers, and why:
- Preferences come from rewards, not from people.
- A rollout has several turns; observations between them are masked, because the policy did not write them.
- `reference = "behaviour"` takes the recorded log-probabilities of the sampler as the reference. No second model is
  held then, and the reference is the policy that acted. `"start"` is the papers': the policy when the algorithm began.
- The temperature that a call was sampled with is part of the policy here, in pi and in the reference.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, get_args

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.supply import RolloutSupply
from agl_algo_torch.data.written_pairs import (
    WrittenAnswer,
    WrittenPair,
    check_ignored,
    check_source,
    read_answers,
    read_pairs,
    told,
)
from agl_algo_torch.learner.batch import RowSample, from_row, micro_batches, recompute_logprobs
from agl_algo_torch.learner.model import LoraSettings
from agl_algo_torch.learner.optim import OptimSettings
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, mean
from agl_algo_torch.learner.tuned_policy import TunedPolicy, at_least_one, one_of
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.reports import averaged
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import by_task
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Episode, Json
    from agl_algo_torch.learner.policy_learner import PolicyLearner

ReferenceKind = Literal["start", "behaviour"]


class Example(Protocol):
    """Something to learn from, made of one rollout or more."""

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Ids of its rollouts."""
        ...


E = TypeVar("E", bound=Example)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Generic[E]):
    """The examples of one step, and the rows that they are made of.

    Attributes:
        examples: Of rollouts, or of what stands for them in `rows`.
        rows: The rows of all rollouts in examples.
        metrics: To log.
        trained: Ids of the rollouts that are trained.
        uses: What became of every call, by rollout id.
        stop_reason: Why no further step has examples; empty while one may.
    """

    examples: list[E]
    rows: list[RowSample]
    metrics: dict[str, float]
    trained: tuple[str, ...] = ()
    uses: dict[str, tuple[CallUse, ...]] = field(default_factory=dict[str, "tuple[CallUse, ...]"])
    stop_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSettings:
    """The settings that these algorithms share; `per_update` examples make one optimizer update."""

    learner: LearnerSettings
    reference: ReferenceKind
    epochs: int
    per_update: int
    token_budget: int
    keep: int
    save_every: int | str


class PreferenceAlgorithm(ABC, Generic[E]):
    """One policy that learns from rollouts against a reference; subclasses choose the examples and judge them.

    Args:
        name: The algorithm's registered name.
        left_out: Why a rollout that is in no example teaches nothing.
        supply: Where its rollouts come from.
        settings: See :class:`PreferenceSettings`.
    """

    def __init__(self, name: str, *, supply: RolloutSupply, settings: PreferenceSettings, left_out: str) -> None:
        one_of(name, reference=(settings.reference, get_args(ReferenceKind)))
        at_least_one(name, epochs=settings.epochs, token_budget=settings.token_budget, keep=settings.keep)
        self._settings, self._left_out = settings, left_out
        has_reference = settings.reference == "start"
        self._tuned = TunedPolicy(
            settings=settings.learner,
            algorithm=name,
            keep=settings.keep,
            save_every=settings.save_every,
            has_reference=has_reference,
        )
        self._supply = supply
        self._step, self._updates = 0, 0

    @abstractmethod
    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[E]:
        """Return what the groups of a step teach; rollouts without a reward or without tokens teach nothing."""

    @abstractmethod
    def counts(self, examples: Sequence[E]) -> dict[str, float]:
        """Return how many examples of each kind a step has, as metrics."""

    @abstractmethod
    def sides(self, examples: Sequence[E]) -> dict[str, str]:
        """Return the part that each rollout takes in the examples, in words, by its id."""

    @abstractmethod
    def judge(self, examples: Sequence[E], ratios: Mapping[str, Ratio]) -> Judgement:
        """Return the loss of an update's examples and its slopes, given the ratios of their rollouts by id."""

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned, and where the rollouts come from."""
        self.begin(context)
        self._supply.begin(context)

    def begin(self, context: AlgorithmContext) -> None:
        """Take the context, and check that one policy with reachable weights is tuned."""
        self._context = context
        self._tuned.begin(context)

    async def step(self) -> StepReport:
        """Take groups, make examples, update, save and publish."""
        step = self._step + 1
        learner = await self._tuned.learner(updates=self._updates)
        moves = learner.moves

        # 1. Take groups, and make examples of them.
        given = await self.gather(step, learner)

        # 2. Update.
        started = time.perf_counter()
        self._tuned.start_updates()
        metrics = given.metrics | self.counts(given.examples) | await self._train(learner, given.examples, given.rows)
        metrics["update_s"] = time.perf_counter() - started

        # 3. Make the new weights live; without an update they are what they were. Save them unless that may wait.
        published = await self._tuned.finish(step=step, has_moved=learner.moves > moves)
        self._step, self._updates = step, learner.updates
        return StepReport(
            step=step,
            is_finished=bool(given.stop_reason),
            metrics=metrics,
            trained=given.trained,
            published=published,
            stop_reason=given.stop_reason,
            uses=given.uses,
        )

    async def gather(self, step: int, learner: PolicyLearner) -> Gathered[E]:
        """Return what a step learns from: by default the examples of the groups of its supply."""
        del learner
        given = await self._supply.take(step)
        examples = self.examples(given.groups)
        # A rollout may be in several examples, but its rows are built once.
        used = {rollout for example in examples for rollout in example.rollouts}
        rows = [row for group in given.groups for e in group if e.rollout.rollout_id in used for row in live_rows(e)]
        return Gathered(
            examples=examples,
            rows=rows,
            metrics=given.metrics,
            trained=tuple(dict.fromkeys(row.rollout for row in rows)),
            uses=self._uses(given.groups, examples),
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

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many tasks a step draws of so many, and how often it runs each, for `agl check --forecast`."""
        return self._supply.size(tasks)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done, or when an exhausted source continues."""
        del tasks
        return self._supply.has_more(state, step=int(state["step"]), sources_go_on=sources_go_on)

    async def close(self) -> None:
        """Drop the model and the reference."""
        self._tuned.close()

    async def _train(self, learner: PolicyLearner, examples: list[E], rows: list[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates."""
        if not examples:
            return {"updates_skipped": 1.0}
        # log ref does not change while the policy does: one pass serves all epochs.
        reference = await asyncio.to_thread(self._reference_sums, learner, rows)
        by_rollout: defaultdict[str, list[RowSample]] = defaultdict(list)
        for row in rows:
            by_rollout[row.rollout].append(row)
        epochs, size = self._settings.epochs, self._settings.per_update
        reports: list[dict[str, float]] = []
        for epoch in range(epochs):
            order = list(examples)
            # Seeded by what a resumed run knows too, so that it sees the examples in the same order.
            random.Random(f"{self._context.seed}/{self._context.name}/{self._step}/{epoch}").shuffle(order)
            for start in range(0, len(order), size):
                part = order[start : start + size]
                reports.append(await asyncio.to_thread(self._update, learner, part, by_rollout, reference))
                self._context.progress(epoch * len(order) + start + len(part), epochs * len(order), "update")
        return averaged(reports)

    def _uses(self, groups: Sequence[Sequence[Episode]], examples: Sequence[E]) -> dict[str, tuple[CallUse, ...]]:
        """Return what became of every call, by rollout id."""
        sides = self.sides(examples)
        uses: dict[str, tuple[CallUse, ...]] = {}
        for episode in (episode for group in groups for episode in group):
            rollout = episode.rollout.rollout_id
            live = {call.span_id for call in episode.transitions} if rollout in sides else ()
            uses[rollout] = call_uses(episode, trained=live, note=sides.get(rollout, ""), left_out=self._left_out)
        return uses

    def _reference_sums(self, learner: PolicyLearner, rows: Sequence[RowSample]) -> dict[str, float]:
        """Return log ref(rollout) by rollout, in nats, before the step's first update."""
        learner.use_threads()
        if self._settings.reference == "behaviour":
            # The sampler recorded log pi_behaviour of every token that it drew; the mask removes what it read.
            return _rollout_sums(rows, [row.behaviour * row.mask for row in rows])
        # The policy as it was when this algorithm began, asked about the same tokens at the same temperatures.
        budget, device = self._settings.token_budget, learner.loaded.device
        with self._tuned.reference.active() as model:
            return _rollout_sums(rows, recompute_logprobs(model, rows, token_budget=budget, device=device))

    def _update(
        self,
        learner: PolicyLearner,
        examples: Sequence[E],
        by_rollout: Mapping[str, Sequence[RowSample]],
        reference: Mapping[str, float],
    ) -> dict[str, float]:
        """Do one optimizer update on whole examples and return its metrics."""
        learner.use_threads()
        model, device, budget = learner.loaded.model, learner.loaded.device, self._settings.token_budget
        # Each rollout is run once, however many examples it is in.
        rollouts = dict.fromkeys(name for example in examples for name in example.rollouts)
        rows = [row for name in rollouts for row in by_rollout[name]]

        # First pass, without gradient: r = log pi - log ref of every rollout.
        policy = _rollout_sums(rows, recompute_logprobs(model, rows, token_budget=budget, device=device))
        ratios = {
            name: Ratio(
                total=policy[name] - reference[name], tokens=sum(row.trained_tokens for row in by_rollout[name])
            )
            for name in rollouts
        }
        judgement = self.judge(examples, ratios)

        # Second pass: the loss sum_t -factor * log pi(y_t) is linear in log pi, and has the gradient of the loss.
        for batch in micro_batches(
            [replace(row, advantages=row.mask * judgement.factors[row.rollout]) for row in rows],  # [T], per token
            [1.0] * len(rows),  # not used: the mean over examples is in the factor
            token_budget=budget,
            device=device,
            is_packed=packs_rows(model),
        ):
            backward(-(batch.advantages_M * batch.logprobs(model)).sum())
        return learner.apply(judgement.metrics)


def can_teach(episode: Episode) -> bool:
    """Return true for an episode that has a reward and tokens of the policy."""
    return episode.reward is not None and any(any(row.mask) for row in episode.rows)


def live_rows(episode: Episode) -> list[RowSample]:
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
        # float64: a ratio is a small difference of sums over thousands of tokens.
        sums[row.rollout] += float(value[1:].double().sum())
    return dict(sums)


Pairing = Literal["extremes", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rollouts of one task by id; `chosen` has the higher reward."""

    chosen: str
    rejected: str

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Both."""
        return (self.chosen, self.rejected)


class PairAlgorithm(PreferenceAlgorithm[Pair]):
    """Learns from pairs, of rollouts or of texts; a subclass says how a pair's loss follows from its margin.

    Args:
        name: The algorithm's registered name.
        supply: Where its rollouts come from.
        settings: What it shares with others that learn from log-ratios.
        pairing: `extremes` (one pair per group) or `all`.
        min_gap: Least difference of two rewards that is a preference.
        is_per_token: Whether a margin compares mean log-ratios per token; else sums.
        data: File of pairs of texts, `""` for those of rollouts.
        steps: Steps in all with `data`.
    """

    def __init__(
        self,
        name: str,
        *,
        supply: RolloutSupply,
        settings: PreferenceSettings,
        pairing: Pairing,
        min_gap: float,
        is_per_token: bool,
        data: str,
        steps: int | None,
    ) -> None:
        super().__init__(name, supply=supply, settings=settings, left_out="its rollout is in no pair")
        one_of(name, pairs=(pairing, get_args(Pairing)))
        at_least_one(name, pairs_per_update=settings.per_update)
        if min_gap <= 0:
            raise ConfigError(f"{name} got min_gap = {min_gap}; two equal rewards are no preference: set it above 0.")
        self._pairing: Pairing = pairing
        self._min_gap, self._is_per_token = min_gap, is_per_token
        self._data, self._steps = data, steps or 1
        self._written: list[WrittenPair] = []

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy, and where the pairs come from; reads those of `data`."""
        if not self._data:
            await super().setup(context)
            return
        self.begin(context)
        check_source(self._data, context.sources, algorithm=context.name)
        self._written = read_pairs(context.folder / self._data)
        context.say(f"{context.name}: {told(len(self._written), 'pairs', self._data)}")

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of so many tasks a step draws, and how many times it runs each; none with `data`."""
        return (0, 0) if self._data else super().step_size(tasks)

    async def gather(self, step: int, learner: PolicyLearner) -> Gathered[Pair]:
        """Return the pairs of `data` if there is one, else those of a step's groups."""
        if not self._data:
            return await super().gather(step, learner)
        loaded = learner.loaded
        rows = [
            row
            for pair in self._written
            for row in pair.rows(tokenizer=loaded.tokenizer, max_tokens=loaded.context_length)
        ]
        pairs = [Pair(chosen=pair.chosen.where, rejected=pair.rejected.where) for pair in self._written]
        is_last = step >= self._steps
        return Gathered(examples=pairs, rows=rows, metrics={}, stop_reason=f"{step} steps done" if is_last else "")

    @abstractmethod
    def pair_loss(self, margin: float) -> tuple[float, float]:
        """Return the loss of a pair and -d loss / d margin; the margin is in nats."""

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Pair]:
        """Return the pairs of all groups, each of two answers to one task: with a `group_key` groups have several."""
        same = [rollouts for group in groups for rollouts in by_task(group).values()]
        return [pair for rollouts in same for pair in make_pairs(rollouts, gap=self._min_gap, pairing=self._pairing)]

    def judge(self, examples: Sequence[Pair], ratios: Mapping[str, Ratio]) -> Judgement:
        """Average the pairs' losses."""
        sizes = {name: ratio.tokens if self._is_per_token else 1 for name, ratio in ratios.items()}
        value = {name: ratio.total / sizes[name] for name, ratio in ratios.items()}
        margins = [value[pair.chosen] - value[pair.rejected] for pair in examples]
        losses: list[float] = []
        factors: defaultdict[str, float] = defaultdict(float)  # adds up over the pairs that a rollout is in
        for pair, margin in zip(examples, margins, strict=True):
            loss, slope = self.pair_loss(margin)
            losses.append(loss)
            factors[pair.chosen] += slope / len(examples) / sizes[pair.chosen]
            factors[pair.rejected] -= slope / len(examples) / sizes[pair.rejected]
        metrics = {
            "loss": mean(losses),
            "margin": mean(margins),
            "accuracy": mean([float(margin > 0) for margin in margins]),  # pairs that the policy ranks as the rewards
        }
        return Judgement(factors=factors, metrics=metrics)

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


class DPO(PairAlgorithm):
    """Trains the weights of one policy on pairs of rollouts of one task, the better against the worse.

    Args:
        data: File of `{"prompt": [...], "chosen": [...], "rejected": [...]}` lines, relative to the experiment's file,
            as `agl data export --format dpo` writes them; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        beta: Strength of the reference: the inverse of how far the policy may go from it.
        min_gap: Least difference of two rewards that is a preference.
        pairs: `extremes` (one pair per group) or `all`.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's pairs; `pairs_per_update` make one optimizer update.
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
        data: str = "",
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
        if group_size == 1 or beta <= 0:
            raise ConfigError(
                f"dpo got {group_size=} and {beta=}; a pair needs a group of 2 at least, and beta must be above 0."
            )
        check_ignored(
            data,
            {
                "tasks_per_step": tasks_per_step is not None,
                "group_size": group_size is not None,
                "max_age": max_age >= 0,
                "min_gap": min_gap != 1e-6,
                "pairs": pairs != "extremes",
                'reference = "behaviour"': reference == "behaviour",
            },
            algorithm="dpo",
        )
        self._beta = beta
        learner = LearnerSettings(
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
        super().__init__(
            "dpo",
            supply=RolloutSupply(
                algorithm="dpo", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            settings=PreferenceSettings(
                learner=learner,
                reference=reference,
                epochs=epochs,
                per_update=pairs_per_update,
                token_budget=token_budget,
                keep=keep,
                save_every=save_every,
            ),
            pairing=pairs,
            min_gap=min_gap,
            is_per_token=False,
            data=data,
            steps=steps,
        )

    def pair_loss(self, margin: float) -> tuple[float, float]:
        """Equation 7 and its slope beta sigmoid(-beta m).

        The slope is near beta where the policy has the pair the wrong way round, and near 0 where it already prefers
        the chosen rollout clearly.
        """
        return -_log_sigmoid(self._beta * margin), self._beta * sigmoid(-self._beta * margin)


def sigmoid(x: float) -> float:
    """Return the logistic function."""
    # Two forms of one function, each with an exponent that is never positive, so nothing overflows.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _log_sigmoid(x: float) -> float:
    # log sigmoid(x) = -log(1 + exp(-x)) = min(x, 0) - log(1 + exp(-|x|)), which loses no digits for large |x|.
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


class IPO(PairAlgorithm):
    """Trains the weights of one policy on pairs of rollouts of one task, towards a margin of a certain size.

    Args:
        data: File of pairs of texts, as for `dpo`; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        beta: Strength of the reference: the margin that a pair is brought to is 1 / (2 `beta`).
        is_per_token: Whether a margin compares means per token of the two rollouts; else sums, as in the paper.
        min_gap: Least difference of two rewards that is a preference.
        pairs: `extremes` (one pair per group) or `all`.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's pairs; `pairs_per_update` make one optimizer update.
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
        data: str = "",
        steps: int | None = None,
        tasks_per_step: int | None = None,
        group_size: int | None = None,
        max_age: int = -1,
        beta: float = 0.1,
        is_per_token: bool = True,
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
        if group_size == 1 or beta <= 0:
            raise ConfigError(
                f"ipo got {group_size=} and {beta=}; a pair needs a group of 2 at least, and beta must be above 0."
            )
        check_ignored(
            data,
            {
                "tasks_per_step": tasks_per_step is not None,
                "group_size": group_size is not None,
                "max_age": max_age >= 0,
                "min_gap": min_gap != 1e-6,
                "pairs": pairs != "extremes",
                'reference = "behaviour"': reference == "behaviour",
            },
            algorithm="ipo",
        )
        self._beta = beta
        learner = LearnerSettings(
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
        super().__init__(
            "ipo",
            supply=RolloutSupply(
                algorithm="ipo", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            settings=PreferenceSettings(
                learner=learner,
                reference=reference,
                epochs=epochs,
                per_update=pairs_per_update,
                token_budget=token_budget,
                keep=keep,
                save_every=save_every,
            ),
            pairing=pairs,
            min_gap=min_gap,
            is_per_token=is_per_token,
            data=data,
            steps=steps,
        )

    def pair_loss(self, margin: float) -> tuple[float, float]:
        """Equation 17 and its slope."""
        distance = margin - 1 / (2 * self._beta)
        return distance**2, -2 * distance


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


_EQUAL = 1e-6
"""Rewards that are no further apart are equal; above the rounding of their sums."""


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
        weight_good: How much a good rollout counts, and `weight_bad` a bad one.
        is_balanced: Whether the rarer kind of a step counts for more, so that both kinds weigh the same.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's rollouts; `rollouts_per_update` make one optimizer update.
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
        data: str = "",
        steps: int | None = None,
        tasks_per_step: int | None = None,
        group_size: int | None = None,
        max_age: int = -1,
        good_from: float | None = None,
        beta: float = 0.1,  # the paper's default
        weight_good: float = 1.0,
        weight_bad: float = 1.0,
        is_balanced: bool = True,
        reference: ReferenceKind = "start",
        epochs: int = 1,
        rollouts_per_update: int = 32,
        lr: float = 1e-6,
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
        at_least_one("kto", rollouts_per_update=rollouts_per_update)
        if min(beta, weight_good, weight_bad) <= 0:
            raise ConfigError(f"kto got {beta=}, {weight_good=} and {weight_bad=}; each must be above 0.")
        if group_size == 1 and good_from is None:
            raise ConfigError(
                "kto got group_size = 1 without good_from; a rollout that is alone in its group has nothing to be "
                "compared with. Set good_from to the least reward of a good rollout, or use a larger group."
            )
        check_ignored(
            data,
            {
                "tasks_per_step": tasks_per_step is not None,
                "group_size": group_size is not None,
                "max_age": max_age >= 0,
                "good_from": good_from is not None,
                'reference = "behaviour"': reference == "behaviour",
            },
            algorithm="kto",
        )
        self._data, self._steps = data, steps or 1
        self._written: list[WrittenAnswer] = []
        self._good_from, self._beta = good_from, beta
        self._weights = {True: weight_good, False: weight_bad}
        self._is_balanced = is_balanced
        learner = LearnerSettings(
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
        super().__init__(
            "kto",
            supply=RolloutSupply(
                algorithm="kto", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            settings=PreferenceSettings(
                learner=learner,
                reference=reference,
                epochs=epochs,
                per_update=rollouts_per_update,
                token_budget=token_budget,
                keep=keep,
                save_every=save_every,
            ),
            left_out="its rollout is neither good nor bad",
        )

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy, and where the answers come from; reads those of `data`."""
        if not self._data:
            await super().setup(context)
            return
        self.begin(context)
        check_source(self._data, context.sources, algorithm="kto")
        self._written = read_answers(context.folder / self._data)
        context.say(f"{context.name}: {told(len(self._written), 'answers', self._data)}")

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of so many tasks a step draws, and how many times it runs each; none with `data`."""
        return (0, 0) if self._data else super().step_size(tasks)

    async def gather(self, step: int, learner: PolicyLearner) -> Gathered[Label]:
        """Return the labels of `data` if there is one, else those of a step's groups."""
        if not self._data:
            return await super().gather(step, learner)
        loaded = learner.loaded
        rows = [
            row
            for answer in self._written
            for row in answer.rows(tokenizer=loaded.tokenizer, max_tokens=loaded.context_length)
        ]
        labels = self._weighed([(answer.dialogue.where, answer.is_good) for answer in self._written])
        is_last = step >= self._steps
        return Gathered(examples=labels, rows=rows, metrics={}, stop_reason=f"{step} steps done" if is_last else "")

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Label]:
        """Return the labels of all rollouts that are good or bad."""
        return self._weighed([label for group in groups for label in self._labels(group)])

    def _weighed(self, found: Sequence[tuple[str, bool]]) -> list[Label]:
        """Return labels with their weights."""
        counts = Counter(is_good for _, is_good in found)
        # Of n rollouts, g good: the good ones count n / 2g each and the bad ones n / 2(n - g).
        is_balanced = self._is_balanced and len(counts) == len(self._weights)
        share = {kind: len(found) / (2 * count) if is_balanced else 1.0 for kind, count in counts.items()}
        return [
            Label(rollout=rollout, is_good=is_good, weight=share[is_good] * self._weights[is_good])
            for rollout, is_good in found
        ]

    def counts(self, examples: Sequence[Label]) -> dict[str, float]:
        """Count the good and the bad rollouts."""
        good = sum(label.is_good for label in examples)
        return {"good": float(good), "bad": float(len(examples) - good)}

    def sides(self, examples: Sequence[Label]) -> dict[str, str]:
        """Return whether each rollout is good or bad, and how much it counts."""
        return {label.rollout: f"{'good' if label.is_good else 'bad'}, counts {label.weight:.3g}" for label in examples}

    def judge(self, examples: Sequence[Label], ratios: Mapping[str, Ratio]) -> Judgement:
        """Equation 8 and its slopes: weight beta s (1 - s), where s is the sigmoid, up for good and down for bad."""
        point = max(0.0, mean([ratio.total for ratio in ratios.values()]))
        losses: list[float] = []
        factors: dict[str, float] = {}
        for label in examples:
            sign = 1.0 if label.is_good else -1.0
            value = sigmoid(self._beta * sign * (ratios[label.rollout].total - point))
            losses.append(label.weight * (1.0 - value))
            factors[label.rollout] = sign * label.weight * self._beta * value * (1.0 - value) / len(examples)
        good = [ratios[label.rollout].total for label in examples if label.is_good]
        bad = [ratios[label.rollout].total for label in examples if not label.is_good]
        margin = mean(good) - mean(bad) if good and bad else 0.0
        return Judgement(factors=factors, metrics={"loss": mean(losses), "margin": margin, "reference_kl": point})

    def _labels(self, group: Sequence[Episode]) -> list[tuple[str, bool]]:
        """Return the ids of a group's rollouts that have a label, and whether they are good."""
        rewards = {e.rollout.rollout_id: e.reward for e in group if can_teach(e) and e.reward is not None}
        if self._good_from is not None:
            return [(name, reward >= self._good_from) for name, reward in rewards.items()]
        middle = mean(list(rewards.values()))
        return [(name, reward > middle) for name, reward in rewards.items() if abs(reward - middle) > _EQUAL]
