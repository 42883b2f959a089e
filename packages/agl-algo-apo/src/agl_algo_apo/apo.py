"""APO: a racing beam over textual gradients, for few rollouts.

Papers: Pryzant et al. 2023, "Automatic Prompt Optimization with Gradient Descent and Beam Search" (ProTeGi, arXiv
2305.03495), algorithms 1 and 2: a critique of failing runs is the gradient g, an edit against it the step. The choice
of the parent and the acceptance on one minibatch are those of Agrawal et al. 2025, "GEPA" (arXiv 2507.19457), section
3. With m(p, D) the mean reward of the texts p on tasks D, one step is:

    1. parent p = the best candidate, or one that leads on some validation tasks           (`proposals/parents.py`)
    2. run p on a minibatch of training tasks; failures that are already paid for come first
    3. `branch_factor` children p_k: each sees a part D_k of the failures;
       critique g_k = critic(p, D_k), and p_k = edit(p, g_k)                               (`evidence.py`, `prompts/`)
    4. static checks: placeholders, invariants, length, copies, duplicates          (`acceptance/static_checks.py`)
    5. trial: m(p_k, D_k) - m(p, D_k) > 0, where p's rewards are already paid for
    6. the changes of all children that passed are merged into one entrant, line by line or by the editor
    7. race the entrant against p on growing slices of the validation set                  (`acceptance/contest.py`);
       if it loses, race the best child alone
    8. the gate compares the best candidate with the first prompt; only a proven one is published (`proof.py`)

Deviations from ProTeGi, and why:
- Candidates are compared on validation tasks: on tasks that its critic has seen, a text may score well by naming them.
- Few rollouts decide. A loser stops at the first slice that shows it, as does a clear winner, and no reward is paid for
  twice.
- Siblings are merged: each repairs another failure, and racing them one by one would cost a race for each.
- Two kinds of ties pass the trial too. A child passes if it and its parent got the worst reward on all its tasks, and
  if no child did better and this one did no harm: with an all-or-nothing reward, single changes rarely show a gain,
  and several together may.
- The best candidate is measured again if nothing beats it for long: the rewards that made it the best one flatter it.
- Every change has to earn its place: if nothing beats the best candidate for long, and at the end, each of its new
  lines is removed alone, and stays out unless that loses something on validation tasks. This removes lines that a merge
  carried along, and lines that only help on training tasks.  (`deletion.py`)
- If ``demonstrations`` allows it, every third step draws examples from recorded good runs of training tasks instead of
  asking critics, as MIPROv2 does (`demonstrator.py`). Its children pass the static checks, a trial on failures of
  the parent that none of them shows, and the race; each example that wins has to earn its place like a line.
- One request gets both critique and edit, unless `critic` names another model.
- The rewards that selected the winner flatter it, so it is measured again at the end on fresh rollouts, and those are
  reported (`acceptance/final_measurement.py`).
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from agl_algo_apo.acceptance.contest import contest, note_check, race
from agl_algo_apo.acceptance.deletion import prune
from agl_algo_apo.measurement.evaluation import MeasureJob
from agl_algo_apo.measurement.journal import CheckReport
from agl_algo_apo.proposals.critics import Assignment, Critics
from agl_algo_apo.proposals.demonstrator import Demonstrator
from agl_algo_apo.proposals.evidence import live_failures, read_failures
from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.proposals.parents import select_parent
from agl_algo_apo.proposals.requests import merge_texts
from agl_algo_apo.search.budget import BudgetLimits, Spent
from agl_algo_apo.search.search import PromptSearch
from agl_algo_apo.search.settings import (
    EXAMPLES,
    PARENTS,
    SCORING,
    TEXTS,
    Examples,
    Parents,
    Preset,
    Publish,
    Scoring,
    SearchSettings,
    Texts,
)
from agl_algo_apo.search.tools import Origin
from agl_algo_apo.texts.lineage import PromptCandidate

DOUBT_EVERY = 3
"""The best candidate is measured again after each further run of this many steps without an improvement."""

MAX_IDLE = 4
"""The search ends after this many consecutive steps without a proposal that could be tried."""


class APO(PromptSearch):
    """Tunes prompts and other texts of an agent by critiques of its failing runs.

    Args:
        optimizer: The model that critiques and edits: ``{base_url=..., model=..., api_key_env=...}`` for any endpoint
            with OpenAI's chat completions, or the name of a policy that the experiment serves.
        critic: Another model for the critiques; by default the optimiser writes critique and text in one answer.
        budget: A number of rollouts; ``light``, ``medium`` or ``heavy`` for 10, 25 or 60 proposals; or ``{rollouts=...,
            calls=..., tokens=..., money=..., prices=...}``. It is never exceeded. The trainer's validations before the
            first step and at the end are part of it, those of `validate_every` are not.
        branch_factor: Children per step, K.
        beam_rounds: The most steps; 0 for no limit but the budget.
        gradient_batch_size: Training tasks per step.
        val_batch_size: Validation tasks in the first slice of a race; each further slice is twice as long.
        parents: The choice of parents: ``selector``, ``p_best``, ``beam_width``.
        patience: Consecutive steps without an improvement that end the search.
        demonstrations: Recorded good runs that a prompt shows as examples: ``most``, 0 for none, and ``max_chars``.
        scoring: The scale of rewards, the final measurement and the error: ``perfect``, ``failure``, ``reserve``,
            ``test``, ``error``.
        publish: Make texts live at every proven ``improvement``, or only at the ``end``.
        texts: The rules for texts: ``invariants``, ``filled``, ``max_chars``, ``roles``.
        requests: Files that replace the requests ``improve``, ``critique`` and ``edit``, ``merge``.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        optimizer: str | OptimizerSettings,
        critic: str | OptimizerSettings | None = None,
        budget: int | Preset | BudgetLimits = "light",
        branch_factor: int = 3,
        beam_rounds: int = 0,
        gradient_batch_size: int = 8,
        val_batch_size: int = 8,
        parents: Parents = PARENTS,
        patience: int = 10,
        demonstrations: Examples = EXAMPLES,
        scoring: Scoring = SCORING,
        publish: Publish = "improvement",
        texts: Texts = TEXTS,
        requests: dict[str, str] | None = None,
    ) -> None:
        settings = SearchSettings.checked(
            "apo",
            optimizer=optimizer,
            critic=critic,
            budget=budget,
            branch_factor=branch_factor,
            beam_rounds=beam_rounds,
            gradient_batch_size=gradient_batch_size,
            val_batch_size=val_batch_size,
            parents=parents,
            patience=patience,
            demonstrations=demonstrations,
            scoring=scoring,
            publish=publish,
            texts=texts,
            requests=requests or {},
        )
        # Two requests per proposal if another model writes the critique, or the user has a separate request for it. g_k
        # and p_k are then two answers, and a proposal takes two calls from the budget.
        asks_twice = critic is not None or not settings.requests.keys().isdisjoint({"critique", "edit"})
        super().__init__(settings, algorithm="apo", calls=2 if asks_twice else 1)
        self._critics = Critics(self, asks_twice=asks_twice)
        self._demonstrator = Demonstrator(self)

    async def improve(self, step: int) -> None:
        """Take one step, as the module's docstring describes it."""
        # After every third step without an improvement: p may have been lucky in m(p, D), or hold lines that do harm.
        if self.progress.stale and self.progress.stale % DOUBT_EVERY == 0:
            await self._remeasure_best(step)
            await prune(self, step)
        await read_failures(self.context, self.progress, perfect_score=self.settings.scoring.perfect)
        # p of this step; all children of the step are edits of it.
        parent = self._parent(step)  # 1
        # D of this step: tasks with a reward below the perfect one, unseen ones first.
        failures = await self._failures(parent, step)  # 2
        if not failures:
            await self._check_if_done(parent, step)
            return
        # Every third step: examples in place of instructions, as MIPROv2 alternates between them.
        drawn = await self._demonstrator.children(parent, failures, step) if self._demonstrator.is_due(step) else []
        if drawn:
            await self._race_best(parent, await self._trial(parent, drawn, step), step)
            return
        # D_k: the failures are distributed, so that siblings learn from different ones.
        assignments = self._critics.assign(failures, parent, step)
        # g_k = critic(p, D_k), p_k = edit(p, g_k), and the static checks, which cost no rollout.
        pairs = await self._critics.children(parent, assignments, step)  # 3 and 4
        self.progress.idle = 0 if pairs else self.progress.idle + 1
        if self.progress.idle >= MAX_IDLE:
            reasons = Counter(c.reason for c in self.lineage.all() if c.status == "rejected")
            self.progress.stop(
                "no_proposals", reasons.most_common(1)[0][0] if reasons else "every proposal was known already"
            )
        if pairs:
            # m(p_k, D_k) against m(p, D_k): only the children run, because p's rewards are paid for.
            passed = await self._trial(parent, pairs, step)  # 5
            await self._race(parent, passed, step)  # 6 and 7

    async def _check_if_done(self, parent: PromptCandidate, step: int) -> None:
        """Handle a minibatch without failures: measure the best candidate on all tasks, or end the search."""
        # A perfect score on all validation tasks ends the search (`PromptSearch._decide_stop`). Only the best candidate
        # can end it; another parent without failures on D may fail elsewhere.
        if parent.id == self.best.id:
            await self.measure_whole(parent, step)
        if not self.is_perfect and len(self.evaluator.scores.rewards(parent.id, "train")) == len(self.context.train):
            self.progress.stop("nothing_to_learn")

    async def _remeasure_best(self, step: int) -> None:
        """Measure the best candidate again if nothing has beaten it for a while.

        The winner of many races on one set of tasks was partly lucky there, and its lucky rewards would keep better
        texts out. A candidate that lost to such rewards may then become the best.
        """
        progress, scores, best = self.progress, self.evaluator.scores, self.best
        # After every third step without an improvement, once each. It takes up to two validation passes: the tasks that
        # the best candidate has not run yet, and all of them again.
        left = self.budget.rollouts_left()
        is_due = progress.stale > progress.doubted and not progress.is_steady
        if not is_due or (left is not None and left < 2 * len(self.order)):
            return
        progress.doubted = progress.stale
        await self.measure_whole(best, step)
        before = scores.rewards(best.id, "val")
        again = MeasureJob(best, "val", tuple(sorted(before)), scores.next_repeat(best.id))
        await self.evaluator.measure([again], step=step, purpose="doubt")
        # Rewards are means over repeats, so a lucky first measurement is now averaged with a fair one. If nothing
        # changed, agent and reward are deterministic, and further measurements would show nothing new.
        progress.is_steady = scores.rewards(best.id, "val") == before
        # Challengers must be measured on all tasks of the best candidate, or the means would be over different tasks.
        known = {c.id: c for c in self.lineage.all() if scores.rewards(c.id, "val").keys() >= before.keys()}
        others = [candidate for candidate in known.values() if candidate.id != best.id]
        if others and not progress.is_steady:
            other = max(others, key=lambda candidate: self.evaluator.mean(candidate.id, "val"))
            # On the last rung only, which is all validation tasks: both are known there, and the rewards are paid for.
            verdicts = await race(self, [other], best, rungs=self.rungs[-1:], step=step, purpose="challenge")
            if verdicts[other.id].has_won:
                self.lineage.put(other.replace(status="pool", reason=verdicts[other.id].words))
                progress.best = other.id

    def _parent(self, step: int) -> PromptCandidate:
        # How often each candidate was a parent.
        children = Counter(parent for candidate in self.lineage.all() for parent in candidate.parents)
        scores = self.evaluator.scores
        return select_parent(
            [candidate for candidate in self.lineage.pool() if scores.rewards(candidate.id, "val")],
            best=self.best,
            evaluator=self.evaluator,
            settings=self.settings,
            draw=self.random(step, "parent"),
            children=children,
        )

    async def _failures(self, parent: PromptCandidate, step: int) -> list[int]:
        """Return training tasks on which the parent falls short: those that no critic has seen first, then the worst.

        A task counts as seen once a critic was shown its failure with this parent.
        """
        # At most B tasks, the minibatch of the paper.
        scores, size = self.evaluator.scores, self.settings.gradient_batch_size
        known = scores.rewards(parent.id, "train")
        used = Counter(self.progress.used.get(parent.id, []))  # how often each task was shown
        # Known failures that no critic was shown cost nothing; new tasks are run only to fill the batch.
        unseen = [task for task, reward in known.items() if reward < self.settings.scoring.perfect and not used[task]]
        rest = [task for task in range(len(self.context.train)) if task not in known]
        self.random(step, "minibatch").shuffle(rest)
        # Tasks that failed for another algorithm with these texts come first; the sort is stable, so the rest stays
        # shuffled.
        rest.sort(key=lambda task: task not in live_failures(self.progress, parent.id))
        # Tasks that are run only to find failures; a known failure is worth as much and costs nothing.
        fresh = rest[: max(0, size - len(unseen))]
        await self.evaluator.measure([MeasureJob(parent, "train", tuple(fresh))], step=step, purpose="batch")
        known = scores.rewards(parent.id, "train")
        failing = [task for task, reward in known.items() if reward < self.settings.scoring.perfect]
        # Tasks that were shown least often first, then the worst, so that critics see new mistakes.
        failing.sort(key=lambda task: (used[task], known[task], task))
        return failing[:size]

    async def _trial(
        self, parent: PromptCandidate, pairs: Sequence[tuple[PromptCandidate, Assignment]], step: int
    ) -> list[PromptCandidate]:
        """Return the children that do better than the parent on the tasks of their assignment.

        Two kinds of ties pass as well: a child whose tasks all got the worst reward before and after, where no gain
        could show; and every child without a loss, if no child has a gain.
        """
        # The parent's rewards on these tasks are known: they are the failures. Only the children run.
        jobs = [MeasureJob(child, "train", assignment.tasks) for child, assignment in pairs]
        await self.evaluator.measure(jobs, step=step, purpose="trial")
        gains = {child.id: self._gain(parent, child, assignment.tasks) for child, assignment in pairs}
        # A gain is above 0 by more than rounding. The trial is biased, because a child was written for just these
        # tasks. So it only rejects texts that do not even help there; the race decides on tasks that nobody saw.
        least = 0.0 if all(gain <= 0 for gain in gains.values()) else 1e-9
        passed: list[PromptCandidate] = []
        for child, assignment in pairs:
            gain = gains[child.id]
            # Stored even if the child fails: if a merge loses, the child with the largest gain races.
            tried = self.lineage.put(child.replace(gain=gain))
            where = "failures of its parent" if child.operator == "demonstrate" else "the tasks it was shown"
            # If every run got the worst reward, the gain of a single child cannot show.
            known = self.evaluator.scores.rewards(parent.id, "train", assignment.tasks)
            is_floor = max(known.values(), default=0.0) <= self.evaluator.scores.floor()
            has_passed = gain >= least or (gain == 0 and is_floor)
            report = CheckReport(name=f"trial on {where}", has_passed=has_passed, step=step, rival=parent.id)
            note_check(self, child.id, report, split="train", tasks=assignment.tasks)
            if has_passed:
                passed.append(tried)
            else:
                self.lineage.put(tried.replace(status="beaten", reason=f"trial: {gain:+.3f} on {where}"))
        return passed

    def _gain(self, parent: PromptCandidate, child: PromptCandidate, tasks: Sequence[int]) -> float:
        """Return m(p_k, D_k) - m(p, D_k) over the tasks that both have rewards on; -1 if there is no such task."""
        ours = self.evaluator.scores.rewards(child.id, "train", tasks)
        theirs = self.evaluator.scores.rewards(parent.id, "train", tasks)
        common = [task for task in tasks if task in ours and task in theirs]
        # Without a common task there is no evidence for the child, so it counts as worse and not as a tie.
        return fmean(ours[task] - theirs[task] for task in common) if common else -1.0

    async def _race(self, parent: PromptCandidate, passed: Sequence[PromptCandidate], step: int) -> None:
        """Race the merged changes of all children that passed as one candidate, or each child if they conflict."""
        if not passed:
            return
        # Step 6: each sibling repairs another failure, and one race for all costs as much as a race for one.
        merged = await self._merged(parent, passed, step) if len(passed) > 1 else None
        child: PromptCandidate | None = None
        parts: Sequence[PromptCandidate] = ()
        if merged is not None:
            texts, parts, spent = merged
            merge = self.proposal(parts, texts, step=step, operator="merge")
            child = await self.screen(merge, parent, origin=Origin(spent=spent))
        if child is None:  # one child alone, a conflict, or a merge that breaks a rule or was tried before
            await contest(self, passed, parent, step=step, purpose="race")
            return
        # The merge stands for its parts: only the merge runs, for the price of one.
        for part in parts:
            self.lineage.put(part.replace(status="beaten", reason=f"became part of {child.id}"))
        # Step 7: the merge has to beat p on tasks that no critic saw.
        if not await contest(self, [child], parent, step=step, purpose="race"):
            # If the merge loses, the part that did best on its tasks races alone: another part may have spoilt the
            # merge.
            best = max(parts, key=lambda part: part.gain or 0.0)
            if (best.gain or 0.0) > 0:  # a part that showed no gain of its own is not worth a race
                await contest(self, [best], parent, step=step, purpose="part")

    async def _race_best(self, parent: PromptCandidate, passed: Sequence[PromptCandidate], step: int) -> None:
        """Race only the child with the largest gain in its trial, because draws of demonstrations hardly differ."""
        ranked = sorted(passed, key=lambda child: child.gain or 0.0, reverse=True)
        for child in ranked[1:]:
            reason = f"trial: {child.gain or 0.0:+.3f}, and {ranked[0].gain or 0.0:+.3f} of {ranked[0].id}"
            self.lineage.put(child.replace(status="beaten", reason=reason))
        if ranked:
            await contest(self, ranked[:1], parent, step=step, purpose="race")

    async def _merged(
        self, parent: PromptCandidate, passed: Sequence[PromptCandidate], step: int
    ) -> tuple[dict[str, str], Sequence[PromptCandidate], Spent] | None:
        """Return texts that combine all changes, the children from which they come, and the cost of the request.

        Changes are merged line by line. If two conflict, the editor merges the texts of the two best children; its
        request holds one resource's texts, so the two must have changed the same one.
        """
        # Three-way, line by line, against p as the base (`proposals/requests.py`).
        merged = merge_texts(parent.instructions, [child.instructions for child in passed])
        if merged is not None:
            return merged, passed, Spent()
        # Only two at a time: a request with more texts gets vague answers.
        first, second = sorted(passed, key=lambda child: child.gain or 0.0, reverse=True)[:2]
        # The resources that both have changed: neither child has the parent's text any more.
        ours, theirs = first.instructions, second.instructions
        names = [name for name, text in parent.instructions.items() if text not in (ours[name], theirs[name])]
        if len(names) != 1:
            return None
        name = names[0]
        request = self.request("merge", name=name, text=ours[name], other=theirs[name])
        _, text, spent = (await self.ask_editor([(request, self.question_seed(step, "merge"))]))[0]
        return None if text is None else ({**ours, name: text}, (first, second), spent)

    async def tidy(self, step: int) -> None:
        """Remove the changes that have not earned their place, before the final measurement."""
        # After an outage of the agent's servers no race could be decided.
        if self.progress.stop_reason != "infrastructure":
            await prune(self, step)
