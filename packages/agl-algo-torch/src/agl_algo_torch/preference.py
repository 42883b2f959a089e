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
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, get_args

from agl.contracts import StepReport
from agl_algo_torch.batch import RowSample, from_row, micro_batches
from agl_algo_torch.forward import recompute_logprobs
from agl_algo_torch.packing import packs_rows
from agl_algo_torch.tuned_policy import TunedPolicy, at_least_one, one_of
from agl_algo_torch.typed_torch import backward
from agl_objectives.reports import averaged
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Episode, Json
    from agl_algo_torch.learner import LearnerSettings, PolicyLearner
    from agl_algo_torch.supply import RolloutSupply

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
        """Return how many of so many tasks a step draws, and how many times it runs each, for `agl plan`."""
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
