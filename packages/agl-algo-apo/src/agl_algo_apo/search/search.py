"""The search around an optimiser's own way to propose: first measurement, stopping, files, state, final measurement.

A search has these parts: measure the first prompt; improve, as often as the budget allows; measure the winner again on
fresh rollouts and report those. Everything that a step needs is in the state before it, and all randomness follows from
(seed, step, purpose). So a repeated step does the same, under the same rollout ids.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from agl.contracts import AlgorithmContext, StepReport, VersionScore
from agl.errors import ConfigError
from agl.schemas import Json
from agl_algo_apo.acceptance.contest import slices
from agl_algo_apo.acceptance.final_measurement import FinalTasks, Result, measure_again, rewards_by
from agl_algo_apo.acceptance.proof import prove, warning_of
from agl_algo_apo.acceptance.static_checks import text_rules
from agl_algo_apo.measurement.evaluation import Evaluator, check_splits, dataset_digest, environment_of
from agl_algo_apo.measurement.journal import CheckReport, compared
from agl_algo_apo.measurement.scores import FRESH, Split
from agl_algo_apo.proposals.optimizer import Optimizer, OptimizerDownError, most_tokens, settings_of
from agl_algo_apo.proposals.requests import Requests
from agl_algo_apo.search.budget import CURRENCIES, Budget, BudgetExhaustedError, BudgetLimits, Spent
from agl_algo_apo.search.progress import SearchProgress
from agl_algo_apo.search.report import (
    metrics_of,
    note_scores,
    publish_best,
    stop_words,
    version_scores,
    write_files,
)
from agl_algo_apo.search.settings import SearchSettings, SpendingPlan, check_question, spending_plan
from agl_algo_apo.search.tools import SearchTools
from agl_algo_apo.texts.lineage import Lineage, PromptCandidate, candidate_id, resource_of, text_of

MAX_BARREN = 6
"""The search ends after this many consecutive answers without a usable text."""


_OUTAGES = ("optimizer_unreachable", "optimizer_garbage", "infrastructure")


class PromptSearch(SearchTools):
    """Base of the optimisers; a subclass overrides :meth:`improve`.

    Args:
        settings: The user's settings.
        algorithm: The optimiser's registered name, for errors.
        calls: Requests to the optimiser's model per proposal.

    Raises:
        ConfigError: A setting is out of its range.
    """

    def __init__(self, settings: SearchSettings, *, algorithm: str, calls: int) -> None:
        super().__init__(settings)
        self._algorithm = algorithm
        self._calls = calls
        self._optimizers: list[Optimizer] = []
        self._reported: dict[tuple[str, str], VersionScore] = {}

    async def improve(self, step: int) -> None:
        """Take one step of the search; subclasses override it."""
        raise NotImplementedError

    async def tidy(self, step: int) -> None:
        """Remove useless parts of the best candidate when the search is over; by default, nothing."""

    # --- the algorithm contract ---------------------------------------------------------------------------------

    async def check(self, context: AlgorithmContext) -> None:
        """Raise :class:`ConfigError` if tasks, prompts, budget, requests or the optimiser's endpoint cannot be used."""
        # Stored here because steps and races read tasks, seed and store from it.
        self.context = context
        check_splits(context)
        self.rules = text_rules(context, self.settings, algorithm=self._algorithm)
        # Refused here, before a rollout is paid for: a budget that ends before the method can show anything.
        self.plan: SpendingPlan = self._spending_plan(context)
        # Rollouts for the final measurement and for the trainer's validation are held back: the search cannot spend
        # them.
        self.budget = Budget(self.plan.limits, kept=self.plan.final + self.plan.after)
        self.requests = Requests(self.settings.requests, folder=context.folder)
        # The two roles of textual gradients: the critic reads failed runs and says what to change (the "gradient"), the
        # editor writes a text that does so (the "step"). One model may have both.
        self.editor = self._open_optimizer(self.settings.optimizer)
        self.critic = self.editor if self.settings.critic is None else self._open_optimizer(self.settings.critic)
        texts = [text_of(rules.seed, name=rules.name) for rules in self.rules]
        check_question(
            self.plan,
            max_input=max(most_tokens(text) for text in texts),
            max_output=max(optimizer.max_tokens for optimizer in self._optimizers),
            algorithm=self._algorithm,
        )
        for optimizer in self._optimizers:
            await optimizer.check()

    def run_size(self, context: AlgorithmContext) -> tuple[int, int]:
        """Return the most rollouts and the most steps of a run, for ``agl check --forecast``; 0 without a limit."""
        return self._spending_plan(context).limits.rollouts or 0, self.settings.beam_rounds

    def _spending_plan(self, context: AlgorithmContext) -> SpendingPlan:
        return spending_plan(
            self.settings,
            tasks=len(context.train),
            val=len(context.val),
            after=context.validation,
            calls=self._calls,
            algorithm=self._algorithm,
        )

    async def setup(self, context: AlgorithmContext) -> None:
        """Check everything that can be checked now, and log the spending plan."""
        await self.check(context)
        self.evaluator = Evaluator(
            context,
            self.budget,
            failure_reward=self.settings.scoring.failure,
            perfect_score=self.settings.scoring.perfect,
        )
        # Positions of validation tasks; the last ones become the test tasks.
        order = list(range(len(context.val)))
        # Shuffled once: files are often sorted, for example by difficulty, and a first slice should resemble all of
        # them.
        self.random(0, "validation order").shuffle(order)
        count = len(order) - self.settings.scoring.test_tasks(len(order))
        self.order: tuple[int, ...] = tuple(order[:count])
        self.test: tuple[int, ...] = tuple(sorted(order[count:]))
        # The slices of every race: F tasks, 2 F, 4 F, and so on, up to all tasks.
        self.rungs = slices(self.order, self.settings.val_batch_size)
        context.say(self.plan.words)
        if warning := warning_of(self.settings.scoring.error, len(context.val)):
            context.say(warning)

    async def step(self) -> StepReport:
        """Take the next step: measure the first prompt, improve, or finish with the final measurement."""
        # The state counts completed steps, so an interrupted step is repeated under its number and rollout ids.
        step = self.progress.step + 1
        before, winner = self.progress.best, self.progress.winner
        paid, scored = self.budget.spent.rollouts, len(self.evaluator.scores)
        # A search that has stopped takes one more step, the final measurement.
        is_final = bool(self.progress.stop_reason)
        try:
            # The first prompt comes first: it is the best candidate until another one wins a race against it.
            if step == 1:
                await self._start(step)
            elif is_final:
                await self._finish(step)
            else:
                await self._refresh(step)
                await self.improve(step)
                await prove(self, step)
                self.progress.rounds += 1
        except BudgetExhaustedError:
            # Raised by a reservation that no longer fits, before anything is spent; the best candidate so far stays the
            # best.
            self.progress.stop("budget")
        except OptimizerDownError as error:
            # Without the model there are no proposals. What the search has found is still measured again and reported.
            self.progress.stop("optimizer_unreachable", str(error))
        self.progress.step = step
        if self.progress.best != before:  # what was known of the old best one says nothing about the new
            self.progress.shared.clear()
            self.progress.doubted, self.progress.is_steady = 0, False
        # Rollouts were paid for and none brought a reward: the agent or its server is down, and more would be wasted.
        is_paid = self.budget.spent.rollouts > paid
        if is_paid and len(self.evaluator.scores) == scored:
            self.progress.stop("infrastructure", f"{self.evaluator.broken.total()} broken rollouts in this process")
        self._decide_stop(is_improved=self.progress.best != before, is_paid=is_paid)
        # After the decision to stop, so that files, metrics and versions describe the same candidate.
        published = await publish_best(self, step, is_final=is_final)
        note_scores(self)
        write_files(self, is_improved=self.progress.winner != winner)
        await self._save_new_scores()
        return StepReport(
            step=step,
            is_finished=is_final,
            metrics=metrics_of(self),
            published=published,
            stop_reason=stop_words(self) if is_final else "",
        )

    def state(self) -> Mapping[str, Json]:
        """Return the state to save: candidates, rewards, spending and counters."""
        return {
            "version": 1,
            "progress": msgspec.to_builtins(self.progress),
            "lineage": self.lineage.dump(),
            "journal": self.journal.dump(),
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
        """Continue from a state of :meth:`state`; raises :class:`ConfigError` if the tasks have changed since."""
        # Rewards are stored by the positions of tasks.
        if state["dataset"] != dataset_digest(self.context):
            raise ConfigError(
                f"{self._algorithm} cannot continue: the training or validation tasks have changed since it started, "
                "so its scores say nothing about them; put the old ones back, or start again with --fresh"
            )
        self.progress = SearchProgress.load(state["progress"])
        self.lineage = Lineage.load(state["lineage"])
        self.journal.load(state["journal"])
        self.evaluator.scores.load(state["scores"])
        self.budget.load(state["spent"])
        # The other resources that affect rewards; `_refresh` notices which have changed meanwhile.
        self.evaluator.environment = dict(state["environment"])
        self.result = None if state["result"] is None else msgspec.convert(state["result"], Result)
        # The first texts of the run and not today's, which may be a winner that was published since.
        seed = self.lineage[self.progress.seed].texts
        self.rules = [
            msgspec.structs.replace(rules, seed=resource_of(seed[rules.name], rules.seed)) for rules in self.rules
        ]
        if self.has_more(state, tasks=len(self.context.train), sources_go_on=False):
            self.progress.stop_reason, self.progress.stop_detail = None, ""
            self.progress.barren = self.progress.idle = 0
            # The fresh rewards have been used for the report, so they may influence choices from here on.
            # From here on they are as biased as all others, and the next report measures anew.
            self.evaluator.scores.keep_fresh()
            self.result = None

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if the search can continue because its stop reason is gone: an outage, or a limit that was
        raised.

        A continued search differs from a longer one by the final measurement in its middle, whose rollouts then count
        as ordinary measurements.
        """
        del sources_go_on
        progress = SearchProgress.load(state["progress"])
        plan = spending_plan(
            self.settings,
            tasks=tasks,
            val=state["val"],
            after=state["validation"],
            calls=self._calls,
            algorithm=self._algorithm,
        )
        match progress.stop_reason:
            case "budget":
                before = msgspec.convert(state["limits"], BudgetLimits)
                # It goes on if any currency has more than before: rollouts, calls, tokens or money.
                pairs = [(getattr(plan.limits, name), getattr(before, name)) for name in CURRENCIES]
                is_over = not any(old is not None and (new is None or new > old) for new, old in pairs)
            case "rounds":
                is_over = 0 < self.settings.beam_rounds <= progress.rounds
            case "patience":
                is_over = self.settings.patience <= progress.stale
            case reason:
                is_over = reason not in _OUTAGES
        # Room for a step and another final measurement; the first prompt is already measured.
        spent, needed = msgspec.convert(state["spent"], Spent), plan.fewest - plan.seed
        has_room = plan.limits.rollouts is None or plan.limits.rollouts - spent.rollouts >= needed
        for name in ("calls", "tokens", "money"):
            limit = getattr(plan.limits, name)
            has_room = has_room and (limit is None or limit > getattr(spent, name))
        return has_room and not is_over

    async def close(self) -> None:
        """Close the connections to the optimiser's model."""
        for optimizer in self._optimizers:
            await optimizer.close()

    # --- the parts of a step ------------------------------------------------------------------------------------

    async def _start(self, step: int) -> None:
        self.evaluator.environment = environment_of(self.context)  # others may have had their turn since the setup
        texts = {rules.name: text_of(rules.seed, name=rules.name) for rules in self.rules}
        seed = await self.evaluator.register(
            PromptCandidate(id=candidate_id(texts), texts=texts, status="pool", step=step)
        )
        # The user's own texts: the first candidate, which a winner has to beat.
        self.lineage.put(seed)
        self.progress.seed = self.progress.best = self.progress.winner = self.progress.published = seed.id
        # The trainer may have validated them before the first step; those rollouts are paid for and count.
        await self.evaluator.adopt(seed, self.context.validated(), test=frozenset(self.test))
        await self.measure_whole(seed, step)

    async def _refresh(self, step: int) -> None:
        """If other resources have changed, forget all rewards and measure the best candidate again."""
        now, before = environment_of(self.context), self.evaluator.environment
        if now == before:
            return
        changed = sorted(name for name in now if now.get(name) != before.get(name))
        self.context.say(f"{', '.join(changed)} changed; rewards from before are out of date and are measured again")
        self.evaluator.environment = now
        # Rewards with other weights or tools say nothing about the texts now.
        self.evaluator.scores.clear()
        # The best candidate is measured again, and winner and first prompt where they are needed; the others leave the
        # pool, because each would cost a whole measurement before it could be compared.
        for candidate in self.lineage.pool():
            if candidate.id not in (self.progress.best, self.progress.winner, self.progress.seed):
                self.lineage.put(candidate.replace(status="beaten", reason="measured before other resources changed"))
        # Nor do the judgements that came from them.
        self.progress.used.clear()
        self.progress.proven.clear()
        await self.measure_whole(self.best, step)

    def _decide_stop(self, *, is_improved: bool, is_paid: bool) -> None:
        """End the search if there is a reason to; a step that ran no rollout does not count against ``patience``."""
        progress = self.progress
        # A bool counts as 0 or 1: one more stale step if rollouts were paid for without an improvement.
        progress.stale = 0 if is_improved or progress.step == 1 else progress.stale + is_paid
        # In the order of the reasons' weight, because only the first one is kept.
        if self.is_perfect:  # on all validation tasks: nothing could be better
            progress.stop("perfect")
        if progress.barren >= MAX_BARREN:  # the model does not do what it is asked for
            words = f"{progress.barren} answers in a row held no usable text"
            progress.stop("optimizer_garbage", f"{words}; {self.editor.hint}" if self.editor.hint else words)
        if 0 < self.settings.beam_rounds <= progress.rounds:
            progress.stop("rounds")
        if progress.stale >= self.settings.patience:  # only steps that paid rollouts count
            progress.stop("patience")

    async def _finish(self, step: int) -> None:
        """Measure the winner and the first prompt on the final tasks, and keep the winner unless it does worse."""
        # Scores from before other algorithms' turns must not influence the choice.
        await self._refresh(step)
        for part in (self.tidy, partial(prove, self, is_last=True)):
            with suppress(BudgetExhaustedError):  # it goes as far as the search's own part of the budget
                await part(step)
        # The trainer's last validation stays reserved.
        self.budget.release(keeping=self.plan.after)  # the rest was held back for this
        # The winner's curse: E[max_i X_i] >= max_i E[X_i], so the largest of several noisy means is above its
        # expectation, and the rewards that chose the best candidate flatter it. Rollouts that have chosen nothing are
        # unbiased.
        self.result = await measure_again(self, self._final_tasks(), step)
        if self.result is not None:
            self.progress.best = self.progress.winner = self.result.winner
            self._note_final(self.result, step)
        self.budget.release()
        self.budget.take_rollouts(self.plan.after)  # the trainer runs them when this step is done

    def _note_final(self, result: Result, step: int) -> None:
        """Record in the journal how the best candidate did in the final measurement."""
        # If the first prompt stays, the best candidate was still judged.
        judged, seed = result.beaten or result.winner, self.progress.seed
        if judged == seed:
            return
        ours, theirs = (rewards_by(self.evaluator, each, result.how) for each in (judged, seed))
        name = f"final measurement ({result.how})"
        report = CheckReport(name=name, has_passed=not result.beaten, step=step, rival=seed, reason=result.verdict)
        # Paired by task: Var(x - y) = Var(x) + Var(y) - 2 Cov(x, y). Both candidates find the same tasks hard, so their
        # differences vary less than two separate means do.
        self.journal.met(judged, compared(report, ours, theirs, tasks=sorted(ours), within=self.evaluator.range))

    def _final_tasks(self) -> FinalTasks:
        """Draw the tasks of the final measurement from the test tasks; without test tasks, from all validation tasks.

        The draw is random because the races have measured some tasks more often than others.
        """
        # No tasks after a stop for infrastructure: their rollouts would fail too.
        paid = 0 if self.progress.stop_reason == "infrastructure" else self.plan.final
        split: Split = "test" if self.test else "val"
        size, tasks = paid // 2, self.test or self.order  # for two finalists
        # All finalists run the same tasks, so that they are compared in pairs.
        drawn = self.random(0, "final").sample(tasks, min(size, len(tasks)))
        # Test tasks are few, so rollouts beyond one per task pay for repeats: the mean of k repeats of a task has 1 / k
        # of the variance of one. On validation tasks a number of its own keeps the fresh reward apart from those of
        # races.
        repeats = tuple(range(size // len(tasks) or 1)) if self.test else (FRESH,)
        return FinalTasks(split, tuple(sorted(drawn)), repeats)

    async def _save_new_scores(self) -> None:
        """Save each version's score in the store if it has changed."""
        scores = version_scores(self)
        # Only changed scores are saved: a score changes with every further measurement of its candidate, and most have
        # none.
        new = {(s.name, s.version): s for s in scores if self._reported.get((s.name, s.version)) != s}
        if new:
            await self.context.store.save_scores(list(new.values()))
        self._reported |= new

    def _open_optimizer(self, optimizer: Any) -> Optimizer:
        memory = self.context.workdir / f"answers-{len(self._optimizers)}.jsonl"
        opened = Optimizer(
            settings_of(optimizer, self.context), budget=self.budget, memory=memory, say=self.context.say
        )
        self._optimizers.append(opened)
        return opened
