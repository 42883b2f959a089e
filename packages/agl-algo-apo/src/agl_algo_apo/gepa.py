"""GEPA by the library of that name: reflective evolution on a Pareto front (Agrawal et al. 2025, arXiv 2507.19457).

An iteration of the library (section 3 of the paper) takes a parent from the Pareto front over validation tasks, runs it
on a minibatch of training tasks, lets a model reflect on the runs and write a new text, and runs that text on the same
minibatch. A text with a larger sum of rewards there is measured on all validation tasks and joins the pool.

The library proposes, accepts and keeps its pool; rollouts, budget, templates, evidence, state and the final measurement
are those of every optimiser here. One phase of the library is one step of the experiment. A phase cannot be interrupted
and continued, so an interrupted step is repeated from its start. It then makes the same requests in the same order and
finds the rollouts that were paid for, so a resumed run ends like an unbroken one.

Deviations from the library's own way, and why:
- The budget is hard. The library checks it between iterations only, and exceeds it by a validation pass.
- Its evaluation cache stays off, because it confuses validation tasks with training tasks at the same position. Rewards
  are remembered outside it, by split, so a parent is not paid for twice on one minibatch.
- A text that breaks its template scores below everything and costs nothing.
- It stops at a perfect score, if the optimiser's model is down or writes nothing usable, and if there is nothing left
  to learn; by itself it would spend the whole budget.
- Its checkpoints are pickles and are not written.
- The winner is measured again on fresh rollouts, and those are reported: the score that selected it flatters it.
"""

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from agl.errors import ConfigError
from agl_algo_apo.acceptance.contest import note_check
from agl_algo_apo.acceptance.proof import judge
from agl_algo_apo.acceptance.static_checks import task_text
from agl_algo_apo.measurement.evaluation import MeasureJob
from agl_algo_apo.measurement.journal import CheckReport
from agl_algo_apo.measurement.scores import Measured, Split
from agl_algo_apo.proposals.answers import before_text
from agl_algo_apo.proposals.evidence import EvidenceRun, read_run
from agl_algo_apo.proposals.gepa_adapter import GepaAdapter, Stopped, TaskPlace, TextByName
from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.search.budget import BudgetExhaustedError, BudgetLimits, Spent
from agl_algo_apo.search.report import write_best
from agl_algo_apo.search.search import MAX_BARREN, PromptSearch
from agl_algo_apo.search.settings import SCORING, TEXTS, Preset, Publish, Scoring, SearchSettings, Texts
from agl_algo_apo.search.tools import Origin
from agl_algo_apo.texts.lineage import PromptCandidate, candidate_id, resource_of

_gepa: Any = import_module("gepa")  # untyped in part


class GEPA(PromptSearch):
    """Tunes prompts and other texts of an agent with the ``gepa`` library.

    Args:
        optimizer: The model that reflects: ``{base_url=..., model=..., api_key_env=...}``, or a policy's name.
        budget: A number of rollouts; ``light``, ``medium`` or ``heavy``; or ``{rollouts=..., calls=..., tokens=...,
            money=..., prices=...}``. It is never exceeded. The trainer's validations before the first step and at the
            end are part of it, those of `validate_every` are not.
        reflection_minibatch_size: Training tasks per proposal.
        phases: Number of runs of the library, each from the best texts so far and with an equal share of the remaining
            budget. In a schedule that alternates, other algorithms take their turns in between.
        use_merge: Merge candidates that are good at different tasks.
        patience: Consecutive phases without an improvement that end the search.
        scoring: The scale of rewards, the final measurement and the error: ``perfect``, ``failure``, ``reserve``,
            ``test``, ``error``.
        publish: Make texts live after every proven ``improvement`` of a phase, or only at the ``end``.
        texts: The rules for texts: ``invariants``, ``filled``, ``max_chars``, ``roles``.
    """

    def __init__(
        self,
        *,
        optimizer: str | OptimizerSettings,
        budget: int | Preset | BudgetLimits = "light",
        reflection_minibatch_size: int = 3,
        phases: int = 1,
        use_merge: bool = False,
        patience: int = 3,
        scoring: Scoring = SCORING,
        publish: Publish = "improvement",
        texts: Texts = TEXTS,
    ) -> None:
        # The library would silently replace 0 by its own defaults.
        low = {"phases": phases, "reflection_minibatch_size": reflection_minibatch_size}
        if min(low.values()) < 1:
            raise ConfigError(f"gepa got {low}; each must be at least 1")
        settings = SearchSettings.checked(
            "gepa",
            optimizer=optimizer,
            budget=budget,
            # One proposal per iteration, as in the paper's algorithm 1.
            branch_factor=1,
            # A phase is a round of the search; the phases share the budget.
            beam_rounds=phases,
            gradient_batch_size=reflection_minibatch_size,
            val_batch_size=1,
            patience=patience,
            scoring=scoring,
            publish=publish,
            texts=texts,
        )
        super().__init__(settings, algorithm="gepa", calls=1)
        self._use_merge = use_merge

    async def improve(self, step: int) -> None:
        """Take one phase: run the library in a thread until its share of the budget is spent or it has to stop."""
        # The phase answers the adapter from this search: its lineage, rewards, budget and journal.
        phase = GepaPhase(self, step)
        adapter = GepaAdapter(phase, asyncio.get_running_loop(), patience=MAX_BARREN)
        try:
            # The library is synchronous; its thread passes work that pays or waits to this event loop.
            await asyncio.to_thread(self._optimise, adapter, step)
        except asyncio.CancelledError:
            adapter.cancel()
            raise
        except BudgetExhaustedError:
            self.progress.stop("budget")
        finally:
            # Every proposal gets a final status, even if the phase was interrupted.
            phase.close()
        if adapter.stopped and adapter.stopped != "share":  # a spent share ends the phase and not the search
            self.progress.stop(adapter.stopped, phase.detail if adapter.stopped == "no_proposals" else "")

    def _optimise(self, adapter: GepaAdapter, step: int) -> None:
        # b, the minibatch of algorithm 1; no larger than the training set.
        size = min(self.settings.gradient_batch_size, len(self.context.train))
        _gepa.optimize(
            # Phi_0 of the phase: the best system so far; in the first phase, the user's.
            seed_candidate=dict(self.best.texts),
            # D_feedback and D_pareto of the paper, by their positions here.
            trainset=[("train", position) for position in range(len(self.context.train))],
            valset=[("val", position) for position in sorted(self.order)],
            adapter=adapter,
            reflection_lm=adapter.reflect,
            reflection_minibatch_size=size,
            # Minibatches without a failure are skipped, because there is nothing to reflect on.
            perfect_score=self.settings.scoring.perfect,
            # The system-aware merge of the paper: two lineages that are good at different tasks.
            use_merge=self._use_merge,
            # The library stops between iterations only; within one, the budget stops the adapter.
            stop_callbacks=[adapter.should_stop],
            logger=_NoLog(),
            track_best_outputs=False,
            cache_evaluation=False,  # it would take train task 3 for validation task 3
            seed=self.random(step, "gepa").randrange(2**31),
        )


class _NoLog:
    """A logger for the library that drops everything; the lineage has the same facts."""

    def log(self, message: str, *_: Any, **__: Any) -> None:
        """Drop the message."""


class GepaPhase:
    """Answers the calls of the library's adapter during one phase, with the search's own tools.

    Attributes:
        detail: The reason why the last refused text was refused.
    """

    def __init__(self, search: GEPA, step: int) -> None:
        self.detail = ""
        self._search = search
        self._step = step
        # Numbers the phase's measurements; with the step it determines the rollouts' ids, which a repeated step finds
        # again.
        self._requests = 0
        # The origin of the next text, for its journal: set by `evidence` and `ask`, read by `refusal`.
        self._origin = Origin()
        self._critique = ""
        self._parent = ""
        # The phase's share counts from here.
        self._began = search.budget.spent.rollouts
        # An equal share of the remaining rollouts for each phase; the last one may use all that is left. Without a
        # limit on rollouts no share can be computed, and the other currencies stop the search.
        left, phases = search.budget.rollouts_left(), search.settings.beam_rounds - search.progress.rounds
        self._share = None if left is None or phases <= 1 else left // phases

    def close(self) -> None:
        """End the phase: mark every candidate that was tried but did not join the pool as beaten."""
        # Accepted candidates are in the pool by now, refused ones are `rejected`.
        lineage = self._search.lineage
        for candidate in lineage.all():
            if candidate.status == "proposed":
                self._note_minibatch(candidate, has_passed=False)
                lineage.put(candidate.replace(status="beaten", reason="not better than its parent on its minibatch"))

    async def refusal(self, texts: TextByName) -> str:
        """Return the reason why these texts may not be tried; ``""`` if they may."""
        search = self._search
        # The library names candidates by their texts, and so does the lineage: equal texts are one candidate.
        key = candidate_id(texts)
        if key not in search.lineage:
            # The candidate whose runs were reflected on last; for a merge, one of the two parents.
            parent = search.lineage[self._parent] if self._parent else search.best
            child = search.proposal([parent], texts, step=self._step, operator="reflect", critique=self._critique)
            await search.screen(child, parent, origin=self._origin)
            self._origin, self._critique = self._origin._replace(spent=Spent()), ""  # the next one pays its own
        candidate = search.lineage[key]
        if candidate.status != "rejected":
            return ""
        # Shown if the phase ends because nothing usable was proposed.
        self.detail = candidate.reason
        return candidate.reason

    async def measure(self, texts: TextByName, places: Sequence[TaskPlace]) -> None:
        """Measure the rewards that are not known yet; a candidate measured on all validation tasks joins the pool."""
        search = self._search
        # `refusal` is called first, so the candidate is known.
        candidate = search.lineage[candidate_id(texts)]
        self._requests += 1
        # Train and validation tasks of one request run at once; known rewards are not measured again.
        tasks: dict[Split, tuple[int, ...]] = {}
        for split, position in places:
            tasks[split] = (*tasks.get(split, ()), position)
        jobs = [MeasureJob(candidate, split, positions) for split, positions in tasks.items()]
        await search.evaluator.measure(jobs, step=self._step, purpose=f"g{self._requests}")
        # The library runs a proposal on all validation tasks only after accepting it on a minibatch, so it joins the
        # pool.
        if len(places) == len(search.order) and places[0][0] == "val":
            self._enter(candidate)

    def known(self, texts: TextByName, place: TaskPlace) -> Measured | None:
        """Return the outcome of these texts on a task; ``None`` if they have not run on it."""
        return self._search.evaluator.scores.get(candidate_id(texts), *place)

    async def evidence(self, name: str, texts: TextByName, measured: Sequence[Measured]) -> list[EvidenceRun]:
        """Return rollouts as evidence about the component ``name``."""
        search = self._search
        # pi_j, the component under review, of this candidate; its runs are the evidence.
        self._parent = candidate_id(texts)
        resource = resource_of(texts[name], search.context.current(name).resource)
        agents = search.settings.texts.roles.get(name, "")
        # mu_f of the paper: the traces and the textual feedback of the minibatch.
        runs = [await read_run(search.context, item, name=name, resource=resource, agents=agents) for item in measured]
        self._origin = Origin(
            shown=tuple(task_text(run.task) for run in runs), evidence=tuple(item.rollout for item in measured)
        )
        return runs

    async def ask(self, request: str, number: int) -> str:
        """Ask the optimiser's model; ``number`` counts the phase's requests. Returns the text of the answer."""
        search = self._search
        answer = await search.editor.ask(request, seed=f"{search.context.seed}/{self._step}/{number}")
        self._origin, self._critique = self._origin._replace(spent=answer.spent), before_text(answer.text)
        return answer.text

    def spent_rollouts(self) -> int:
        """Return the number of rollouts that were paid for so far."""
        return self._search.budget.spent.rollouts

    def stop_reason(self) -> Stopped:
        """Return the reason to stop: a perfect score, or no room for a proposal in the budget or the phase's share.

        The result is ``""`` to continue.
        """
        search = self._search
        # A perfect score on all of D_pareto ends the search.
        rewards = search.evaluator.scores.rewards(search.best.id, "val").values()
        if len(rewards) == len(search.order) and min(rewards) >= search.settings.scoring.perfect:
            return "perfect"
        left = search.budget.rollouts_left()
        # A proposal takes a minibatch and, if accepted, all validation tasks; the parent's rewards are known.
        if left is not None and left < search.settings.gradient_batch_size + len(search.order):
            return "budget"
        # The other phases need their shares: other algorithms have their turns in between.
        if self._share is not None and self.spent_rollouts() - self._began >= self._share:
            return "share"
        return ""

    def _enter(self, candidate: PromptCandidate) -> None:
        """Add a candidate to the pool; if it is the best so far, let the gate decide whether it is the winner."""
        search = self._search
        # Measured again after a resume; it has already been recorded.
        if candidate.status == "pool":
            return
        # P of algorithm 1: the pool from whose front the library draws parents.
        candidate = search.lineage.put(candidate.replace(status="pool"))
        self._note_minibatch(candidate, has_passed=True)
        search.progress.raced.append(candidate.id)
        # S of the paper, averaged: the front decides on parents, the mean on the best candidate.
        means = [search.evaluator.mean(owner, "val") for owner in (candidate.id, search.progress.best)]
        is_best = means[0] > means[1]
        name = "best on all validation tasks"
        report = CheckReport(name=name, has_passed=is_best, step=self._step, rival=search.progress.best)
        note_check(search, candidate.id, report, split="val", tasks=search.order)
        if is_best:
            search.progress.best = candidate.id
            judge(search, self._step)
            # Whatever happens to the rest of the phase, the winner is on disk.
            write_best(search.context.workdir, search.winner.texts)

    def _note_minibatch(self, candidate: PromptCandidate, *, has_passed: bool) -> None:
        """Record how a candidate compares with its parent on the training tasks that both have run."""
        search = self._search
        rival = candidate.parents[0] if candidate.parents else search.progress.seed
        report = CheckReport(name="trial on its minibatch", has_passed=has_passed, step=self._step, rival=rival)
        note_check(search, candidate.id, report, split="train", tasks=range(len(search.context.train)))
