"""The search around an optimiser's own way to propose: first measurement, stopping, files, state, final measurement.

A search takes these steps: measure the first prompt; improve, as often as the budget allows; measure the winner again
on fresh rollouts and report those. Everything that a step needs is in the state before it, and all randomness follows
from (seed, step, purpose), so a step that is repeated does the same, under the same rollout ids.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agl.contracts import AlgorithmContext, StepReport, VersionScore
from agl.errors import ConfigError
from agl.schemas import Json
from agl_algo_apo import artifacts
from agl_algo_apo.answers import extract
from agl_algo_apo.budget import Budget, BudgetExhaustedError
from agl_algo_apo.candidates import Lineage, PromptCandidate, candidate_id, resource_of, text_of
from agl_algo_apo.evaluation import (
    FRESH,
    Evaluator,
    MeasureJob,
    Split,
    check_splits,
    dataset_digest,
    environment_of,
    nothing_scored,
)
from agl_algo_apo.extension import has_more
from agl_algo_apo.final_measurement import FinalTasks, Result, measure_again
from agl_algo_apo.optimizer import Optimizer, OptimizerDownError, most_tokens, settings_of
from agl_algo_apo.progress import STOP_WORDS, SearchProgress, StopReason
from agl_algo_apo.proposals import Requests
from agl_algo_apo.race import Verdict, race, slices
from agl_algo_apo.settings import SearchSettings, SpendingPlan, check_question, spending_plan
from agl_algo_apo.templates import TextRules, check_fields, check_seed, identifiers_of, violation
from agl_algo_apo.version_scores import CandidateScore, candidate_scores, version_scores

MAX_TRIES = 4
"""Most tries of one candidate."""

MAX_BARREN = 6
"""The search ends after so many answers in a row without a usable text."""


class PromptSearch:
    """The base of an optimiser, which overrides :meth:`improve`.

    Args:
        settings: The person's settings.
        algorithm: The optimiser's registered name, for errors.
        calls: Questions to the optimiser's model per proposal.

    Raises:
        ConfigError: A setting is out of its range.
    """

    def __init__(self, settings: SearchSettings, *, algorithm: str, calls: int) -> None:
        settings.check(algorithm)
        self.settings = settings
        self._algorithm = algorithm
        self._calls = calls
        self._optimizers: list[Optimizer] = []
        self.lineage = Lineage()
        self.progress = SearchProgress()
        self.result: Result | None = None
        self._known_by: frozenset[str] | None = None
        self._told: dict[tuple[str, str], VersionScore] = {}

    async def improve(self, step: int) -> None:
        """Take one step of the search; to be overridden."""
        raise NotImplementedError

    async def tidy(self, step: int) -> None:
        """Take out of the best candidate what gives nothing, when the search is over; may be overridden."""

    # --- the algorithm contract ---------------------------------------------------------------------------------

    async def check(self, context: AlgorithmContext) -> None:
        """Check tasks, prompts, budget, requests and the optimiser's endpoint; raises :class:`ConfigError`."""
        self.context = context
        check_splits(context)
        self.rules = self._rules(context)
        self.plan: SpendingPlan = spending_plan(
            self.settings,
            tasks=len(context.train),
            val=len(context.val),
            after=context.validation,
            calls=self._calls,
            algorithm=self._algorithm,
        )
        self.budget = Budget(self.plan.limits, prices=self.settings.prices, kept=self.plan.final + self.plan.after)
        self.requests = Requests(self.settings.requests, folder=context.folder)
        self.editor = self._open_optimizer(self.settings.optimizer)
        self.critic = self.editor if self.settings.critic is None else self._open_optimizer(self.settings.critic)
        self._check_question()
        for optimizer in self._optimizers:
            await optimizer.check()

    async def setup(self, context: AlgorithmContext) -> None:
        """Check everything that can be checked now, and say what will be spent."""
        await self.check(context)
        self.evaluator = Evaluator(
            context,
            self.budget,
            failure_reward=self.settings.failure_reward,
            perfect_score=self.settings.perfect_score,
        )
        order = list(range(len(context.val)))
        # Shuffled once: files are often sorted, by difficulty say, and a first slice should look like all of them.
        self.random(0, "validation order").shuffle(order)
        count = len(order) - self.settings.test_tasks(len(order))
        self.order: tuple[int, ...] = tuple(order[:count])
        self.test: tuple[int, ...] = tuple(sorted(order[count:]))
        self.rungs = slices(self.order, self.settings.val_batch_size)
        context.say(self.plan.words)

    async def step(self) -> StepReport:
        """Measure the first prompt, improve, or finish with the final measurement."""
        step = self.progress.step + 1
        before, paid, scored = self.progress.best, self.budget.spent.rollouts, len(self.evaluator.scores)
        is_final = bool(self.progress.stop_reason)
        try:
            if step == 1:
                await self._start(step)
            elif is_final:
                await self._finish(step)
            else:
                await self._refresh(step)
                await self.improve(step)
                self.progress.rounds += 1
        except BudgetExhaustedError:
            self.progress.stop("budget")
        except OptimizerDownError as error:
            self.progress.stop("optimizer_unreachable", str(error))
        self.progress.step = step
        if self.progress.best != before:  # what was known of the old best one says nothing about the new
            self.progress.shared.clear()
            self.progress.doubted, self.progress.is_steady = 0, False
        # Rollouts were paid and none brought a reward: the agent or its server is down, and more would be wasted.
        is_paid = self.budget.spent.rollouts > paid
        if is_paid and len(self.evaluator.scores) == scored:
            self.progress.stop("infrastructure", f"{self.evaluator.broken.total()} broken rollouts in this process")
        self._decide_stop(is_improved=self.progress.best != before, is_paid=is_paid)
        published = await self._publish(step, is_final=is_final)
        self._write(is_improved=self.progress.best != before)
        await self._save_new_scores()
        return StepReport(
            step=step,
            is_finished=is_final,
            metrics=self._metrics(),
            published=published,
            stop_reason=self._stop_words() if is_final else "",
        )

    def state(self) -> Mapping[str, Json]:
        """Return candidates, rewards, spending and counters."""
        return {
            "version": 1,
            "progress": msgspec.to_builtins(self.progress),
            "lineage": self.lineage.dump(),
            "scores": self.evaluator.scores.dump(),
            "spent": self.budget.dump(),
            "limits": msgspec.to_builtins(self.plan.limits),
            "val": len(self.context.val),
            "validation": self.context.validation,
            "environment": self.evaluator.environment,
            "dataset": dataset_digest(self.context),
            "result": None if self.result is None else msgspec.to_builtins(self.result),
        }

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from :meth:`state`; raises :class:`ConfigError` for a state that belongs to other tasks."""
        if state["dataset"] != dataset_digest(self.context):
            raise ConfigError(
                f"{self._algorithm} cannot continue: the training or validation tasks have changed since it started, "
                "so its scores say nothing about them; put the old ones back, or start again with --fresh"
            )
        self.progress = msgspec.convert(state["progress"], SearchProgress)
        self.lineage = Lineage.load(state["lineage"])
        self.evaluator.scores.load(state["scores"])
        self.budget.load(state["spent"])
        self.evaluator.environment = dict(state["environment"])
        self.result = None if state["result"] is None else msgspec.convert(state["result"], Result)
        seed = self.lineage[self.progress.seed].texts
        self.rules = [
            msgspec.structs.replace(rules, seed=resource_of(seed[rules.name], rules.seed)) for rules in self.rules
        ]
        if self.has_more(state, tasks=len(self.context.train), sources_go_on=False):
            self._reopen()

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return whether the reason for which the search ended is gone: an outage, or a limit that was raised.

        A search that continues differs from one of that length by the final measurement in its middle, whose rollouts
        count as further measurements from then on.
        """
        del sources_go_on
        return has_more(self.settings, state, tasks=tasks, calls=self._calls, algorithm=self._algorithm)

    def _reopen(self) -> None:
        self.progress.reopen()
        self.evaluator.scores.keep_fresh()
        self.result = None

    async def close(self) -> None:
        """Close the connections to the optimiser's model."""
        for optimizer in self._optimizers:
            await optimizer.close()

    # --- what improving steps use -------------------------------------------------------------------------------

    @property
    def best(self) -> PromptCandidate:
        """The best candidate so far."""
        return self.lineage[self.progress.best]

    @property
    def is_perfect(self) -> bool:
        """True if the best candidate scores the perfect score on every validation task."""
        known = self.evaluator.scores.rewards(self.progress.best, "val")
        return len(known) == len(self.order) and min(known.values()) >= self.settings.perfect_score

    def random(self, step: int, purpose: str) -> random.Random:
        """Return a random generator that follows from seed, step and purpose alone."""
        return random.Random(f"{self.context.seed}/{self.context.name}/{step}/{purpose}")

    async def admit(
        self, child: PromptCandidate, parent: PromptCandidate, *, shown: Sequence[str] = ()
    ) -> PromptCandidate | None:
        """Return the candidate with versions that rollouts can pin, or ``None`` if it may not be tried.

        A proposal that breaks a rule stays in the lineage with the reason. One that was tried and beaten before may be
        tried again when it is proposed again: chance may have been against it, and its rewards so far still count.
        """
        known = self.lineage.get(child.id)
        if known is not None:
            if known.status != "beaten" or known.tries >= MAX_TRIES:
                return None
            return self.lineage.put(known.replace(status="proposed", tries=known.tries + 1))
        known_by = await self._identifiers()
        broken = [violation(child.texts[r.name], r, shown=shown, identifiers=known_by) for r in self.rules]
        reason = next((text for text in broken if text), "")
        if reason:
            self.lineage.put(child.replace(status="rejected", reason=reason))
            return None
        return self.lineage.put(await self.evaluator.register(child, parent=parent))

    def proposal(
        self,
        parents: Sequence[PromptCandidate],
        texts: Mapping[str, str],
        *,
        step: int,
        operator: str,
        critique: str = "",
    ) -> PromptCandidate:
        """Return a candidate with these texts, which is not in the lineage yet."""
        return PromptCandidate(
            id=candidate_id(texts),
            texts=dict(texts),
            parents=tuple(parent.id for parent in parents),
            operator=operator,
            step=step,
            critique=critique,
        )

    async def ask_for_texts(self, questions: Sequence[tuple[str, str]]) -> list[str | None]:
        """Return the editor's new texts for (request, seed) pairs, ``None`` where an answer holds none."""
        return [text for _, text in await self.ask_editor(questions)]

    async def ask_editor(self, questions: Sequence[tuple[str, str]]) -> list[tuple[str | None, str | None]]:
        """Return the editor's answers with their new texts, ``None`` where there is none."""
        answers = await self.editor.ask_all(questions)
        texts = [None if answer is None else extract(answer) for answer in answers]
        for answer, text in zip(answers, texts, strict=True):
            if answer is not None:  # a model that does not answer is counted elsewhere
                self.progress.barren = 0 if text is not None else self.progress.barren + 1
        return list(zip(answers, texts, strict=True))

    def request(self, kind: str, *, name: str, **values: str) -> str:
        """Return a request to the editor about one resource, with the rules that its text must keep."""
        constraints = "\n".join(next(rules for rules in self.rules if rules.name == name).words())
        return self.requests.text(kind, component=name, constraints=constraints, **values)

    def question_seed(self, step: int, purpose: str) -> str:
        """Return a seed that makes the same request in another step another question, with an answer of its own."""
        return f"{self.context.seed}/{self.context.name}/{step}/{purpose}"

    async def measure_whole(self, candidate: PromptCandidate, step: int) -> None:
        """Run the validation tasks that are not known yet; raises :class:`RunError` when not one can be scored."""
        await self.evaluator.measure([MeasureJob(candidate, "val", self.order)], step=step, purpose="whole")
        if not self.evaluator.scores.rewards(candidate.id, "val"):
            raise nothing_scored(len(self.order), self.evaluator.broken)

    async def contest(
        self,
        entrants: Sequence[PromptCandidate],
        rival: PromptCandidate,
        *,
        step: int,
        purpose: str,
        may_tie: bool = False,
    ) -> list[PromptCandidate]:
        """Race proposals against their parent; winners join the pool and are returned, the best one first."""
        verdicts: dict[str, Verdict] = await race(
            self.evaluator, entrants, rival, rungs=self._rungs(entrants), step=step, purpose=purpose, may_tie=may_tie
        )
        winners: list[PromptCandidate] = []
        for entrant in entrants:
            verdict = verdicts[entrant.id]
            status = "pool" if verdict.has_won else "beaten"
            decided = self.lineage.put(entrant.replace(status=status, reason=verdict.words))
            if verdict.has_won:
                winners.append(decided)
        winners.sort(key=lambda winner: verdicts[winner.id].difference, reverse=True)
        if winners:
            await self._promote(winners[0], rival, step=step, may_tie=may_tie)
        return winners

    def _rungs(self, entrants: Sequence[PromptCandidate]) -> Sequence[tuple[int, ...]]:
        """Return the slices of a race; an entrant that runs again starts beyond those that decided it before."""
        again = [entrant for entrant in entrants if entrant.tries > 1]
        known = max((len(self.evaluator.scores.rewards(entrant.id, "val")) for entrant in again), default=0)
        return [rung for rung in self.rungs if len(rung) > known] or self.rungs[-1:]

    async def _identifiers(self) -> frozenset[str]:
        """Return the words that belong to one training task each, of what the agent sees of it."""
        if self._known_by is None:
            hidden = await self.evaluator.hidden_keys()
            self._known_by = identifiers_of(self.context.train, self.context.val, hidden=hidden)
        return self._known_by

    # --- the parts of a step ------------------------------------------------------------------------------------

    async def _start(self, step: int) -> None:
        self.evaluator.environment = environment_of(self.context)  # others may have had their turn since the setup
        texts = {rules.name: text_of(rules.seed, name=rules.name) for rules in self.rules}
        seed = await self.evaluator.register(
            PromptCandidate(id=candidate_id(texts), texts=texts, status="pool", step=step)
        )
        self.lineage.put(seed)
        self.progress.seed = self.progress.best = self.progress.published = seed.id
        await self.evaluator.adopt(seed, self.context.validated(), test=frozenset(self.test))
        await self.measure_whole(seed, step)

    async def _refresh(self, step: int) -> None:
        """Forget all rewards when other resources have changed, and measure the best candidate again."""
        now, before = environment_of(self.context), self.evaluator.environment
        if now == before:
            return
        changed = sorted(name for name in now if now.get(name) != before.get(name))
        self.context.say(f"{', '.join(changed)} changed; rewards from before are out of date and are measured again")
        self.evaluator.environment = now
        self.evaluator.scores.clear()
        for candidate in self.lineage.pool():
            if candidate.id not in (self.progress.best, self.progress.seed):
                self.lineage.put(candidate.replace(status="beaten", reason="measured before other resources changed"))
        self.progress.used.clear()
        self.progress.proven.clear()
        self.progress.pruned.clear()
        await self.measure_whole(self.best, step)

    async def _promote(self, winner: PromptCandidate, rival: PromptCandidate, *, step: int, may_tie: bool) -> None:
        """Make a winner the best candidate; where its rival was another, it has to beat the best one first."""
        if rival.id != self.progress.best:
            verdicts = await race(
                self.evaluator, [winner], self.best, rungs=self.rungs, step=step, purpose="crown", may_tie=may_tie
            )
            if not verdicts[winner.id].has_won:
                return
        self.progress.best = winner.id

    def _decide_stop(self, *, is_improved: bool, is_paid: bool) -> None:
        """Stop where there is a reason to; a step that ran no rollout does not count against patience."""
        progress = self.progress
        # A bool counts as 0 or 1: one more stale step where rollouts were paid for no improvement.
        progress.stale = 0 if is_improved or progress.step == 1 else progress.stale + is_paid
        if self.is_perfect:
            progress.stop("perfect")
        if progress.barren >= MAX_BARREN:
            progress.stop("optimizer_garbage", self._garbage_words())
        if 0 < self.settings.beam_rounds <= progress.rounds:
            progress.stop("rounds")
        if progress.stale >= self.settings.patience:
            progress.stop("patience")

    def _garbage_words(self) -> str:
        words = f"{self.progress.barren} answers in a row held no usable text"
        return f"{words}; {self.editor.hint}" if self.editor.hint else words

    async def _finish(self, step: int) -> None:
        """Measure the two best candidates and the first prompt on fresh rollouts, and keep the winner."""
        await self._refresh(step)
        with suppress(BudgetExhaustedError):  # it goes as far as the search's own part of the budget
            await self.tidy(step)
        self.budget.release(keeping=self.plan.after)  # the rest was held back for this
        self.result = await measure_again(
            self.evaluator,
            self.lineage,
            best=self.best,
            seed=self.lineage[self.progress.seed],
            tasks=self._final_tasks(),
            step=step,
        )
        if self.result is not None:
            self.progress.best = self.result.winner
        self.budget.release()
        self.budget.take_rollouts(self.plan.after)  # the trainer runs them when this step is done

    def _final_tasks(self) -> FinalTasks:
        """Return the tasks of the final measurement: those held back, or any, as races have looked at some the most."""
        # None where they would fail anyway.
        paid = 0 if self.progress.stop_reason == "infrastructure" else self.plan.final
        split: Split = "test" if self.test else "val"
        size, tasks = paid // (2 if self.test else 3), self.test or self.order  # by the number of finalists
        drawn = self.random(0, "final").sample(tasks, min(size, len(tasks)))
        repeats = tuple(range(size // len(tasks) or 1)) if self.test else (FRESH,)
        return FinalTasks(split, tuple(sorted(drawn)), repeats)

    async def _publish(self, step: int, *, is_final: bool) -> tuple[str, ...]:
        """Make the best texts live where they are not, at every improvement or at the end; returns the versions."""
        is_new = self.progress.best != self.progress.published
        if not is_new or (self.settings.publish == "end" and not is_final):
            return ()
        before = self.lineage[self.progress.published].texts
        metadata: dict[str, Json] = {"candidate_id": self.best.id, "operator": self.best.operator}
        published: list[str] = []
        for rules in self.rules:
            text = self.best.texts[rules.name]
            if text != before[rules.name]:
                resource = resource_of(text, rules.seed)
                made = await self.context.publish(rules.name, resource, step=step, metadata=metadata)
                published.append(f"{rules.name}@{made.version}")
        self.progress.published = self.progress.best
        return tuple(published)

    async def _save_new_scores(self) -> None:
        """Save the score of each version in the store, where it is new."""
        scores = version_scores(
            self.lineage,
            self._scores(),
            seed=self.progress.seed,
            published=self.progress.published,
            live={name: self.context.current(name).version for name in self.context.tunes},
        )
        new = {(s.name, s.version): s for s in scores if self._told.get((s.name, s.version)) != s}
        if new:
            await self.context.store.save_scores(list(new.values()))
        self._told |= new

    def _scores(self) -> dict[str, CandidateScore]:
        return candidate_scores(self.lineage, self.evaluator, seed=self.progress.seed, result=self.result)

    def _write(self, *, is_improved: bool) -> None:
        workdir = self.context.workdir
        if is_improved or self.progress.step == 1:
            artifacts.write_best(workdir, self.best.texts)
        scores = self._scores()
        rows = [
            {**msgspec.structs.asdict(c), "score": msgspec.to_builtins(scores.get(c.id))} for c in self.lineage.all()
        ]
        artifacts.write_lineage(workdir, rows)
        if self.result is not None:
            reason = {"stop_reason": self.progress.stop_reason, "stop_detail": self.progress.stop_detail}
            spent = {"spent": msgspec.structs.asdict(self.budget.spent), "texts": self.best.texts}
            artifacts.write_result(workdir, {**msgspec.structs.asdict(self.result), **reason, **spent})

    def _metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {
            "candidates": float(len(self.lineage.all())),
            "rejected": float(sum(c.status == "rejected" for c in self.lineage.all())),
            "unmeasured": float(self.evaluator.broken.total()),
        }
        if self.result is not None:
            metrics |= {"score": self.result.score.mean, "seed_score": self.result.seed_score.mean}
        elif self.progress.best in (scores := self._scores()):
            metrics["best_val_score"] = scores[self.progress.best].mean
        spent: dict[str, Any] = msgspec.structs.asdict(self.budget.spent)
        return metrics | {f"spent_{name}": float(value) for name, value in spent.items()}

    def _stop_words(self) -> str:
        reason: StopReason = self.progress.stop_reason or "budget"
        detail = f" ({self.progress.stop_detail})" if self.progress.stop_detail else ""
        return f"{reason}: {STOP_WORDS[reason]}{detail}. {self.result.words if self.result else ''}".strip()

    # --- setting up ---------------------------------------------------------------------------------------------

    def _rules(self, context: AlgorithmContext) -> list[TextRules]:
        if not context.tunes:
            raise ConfigError(
                f"{self._algorithm} has no prompt to tune; set tunes to a [resource.NAME] with a template or a value"
            )
        settings = self.settings
        unknown = sorted({*settings.invariants, *settings.roles} - set(context.tunes))
        if unknown:
            raise ConfigError(f"invariants or roles name {unknown}; this algorithm tunes {list(context.tunes)}")
        rules: list[TextRules] = []
        for name in context.tunes:
            resource = context.current(name).resource
            text = text_of(resource, name=name)
            longest = settings.max_chars or max(4000, 4 * len(text))
            rules.append(
                TextRules(name=name, seed=resource, invariants=settings.invariants.get(name, ()), max_chars=longest)
            )
            check_seed(rules[-1])
            check_fields(name, resource, [*context.train, *context.val], filled=settings.filled)
        return rules

    def _check_question(self) -> None:
        texts = [text_of(rules.seed, name=rules.name) for rules in self.rules]
        check_question(
            self.plan,
            self.settings.prices,
            max_input=max(most_tokens(text) for text in texts),
            max_output=max(optimizer.max_tokens for optimizer in self._optimizers),
            algorithm=self._algorithm,
        )

    def _open_optimizer(self, optimizer: Any) -> Optimizer:
        memory = self.context.workdir / f"answers-{len(self._optimizers)}.jsonl"
        opened = Optimizer(
            settings_of(optimizer, self.context), budget=self.budget, memory=memory, say=self.context.say
        )
        self._optimizers.append(opened)
        return opened
