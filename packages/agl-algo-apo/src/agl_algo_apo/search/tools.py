"""The tools of a search's improving steps: proposals and their static gate, questions, races, the journal.

Everything here follows from the search's state and (seed, step, purpose), so a step that is repeated does the same.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from agl.contracts import AlgorithmContext
from agl_algo_apo.acceptance.held_out import HeldOut
from agl_algo_apo.acceptance.race import Verdict, race
from agl_algo_apo.acceptance.static_gate import TextRules, identifiers_of, violation
from agl_algo_apo.measurement.evaluation import Evaluator, MeasureJob, nothing_scored
from agl_algo_apo.measurement.journal import STATIC, GateReport, Journal, compared
from agl_algo_apo.measurement.scores import Split
from agl_algo_apo.proposals.answers import before_text, extract
from agl_algo_apo.proposals.optimizer import Optimizer
from agl_algo_apo.proposals.requests import Requests
from agl_algo_apo.search.budget import Budget, Spent
from agl_algo_apo.search.progress import SearchProgress
from agl_algo_apo.search.settings import SearchSettings, SpendingPlan
from agl_algo_apo.texts.demonstrations import Demonstrations, demonstrated
from agl_algo_apo.texts.lineage import Lineage, PromptCandidate, candidate_id

if TYPE_CHECKING:
    from agl_algo_apo.acceptance.final_measurement import Result

MAX_TRIES = 4
"""Most tries of one candidate."""

RACES: Mapping[str, str] = {
    "race": "race against the parent",
    "part": "race of the best part of a merge",
    "crown": "race against the best",
    "challenge": "second chance against the best",
    "prune": "race without one change",
    "doubtful": "race without one change, once more",
    "undo": "race without the most useless change",
    "delete": "race without all useless changes",
}
"""The name of the gate that a race is, by its purpose."""


class Written(NamedTuple):
    """An answer of the editor: its words, the text that it proposes, ``None`` without one, and its cost."""

    critique: str = ""
    text: str | None = None
    spent: Spent = Spent()


class Origin(NamedTuple):
    """The origin of a proposal.

    Attributes:
        shown: Texts of the tasks that its author saw.
        evidence: Ids of the rollouts that its author saw.
        spent: The questions that it took.
    """

    shown: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    spent: Spent = Spent()


class SearchTools:
    """The base of a search; its attributes are set by `search/search.py` before the first step."""

    context: AlgorithmContext
    evaluator: Evaluator
    budget: Budget
    plan: SpendingPlan
    requests: Requests
    editor: Optimizer
    critic: Optimizer
    rules: list[TextRules]
    order: tuple[int, ...]
    rungs: list[tuple[int, ...]]

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.lineage = Lineage()
        self.progress = SearchProgress()
        self.result: Result | None = None
        self._known_by: frozenset[str] | None = None
        self._marks: HeldOut | None = None

    @property
    def journal(self) -> Journal:
        """The journal of all candidates."""
        return self.evaluator.journal

    @property
    def best(self) -> PromptCandidate:
        """The best candidate so far."""
        return self.lineage[self.progress.best]

    @property
    def is_perfect(self) -> bool:
        """True if the best candidate scores the perfect score on every validation task."""
        known = self.evaluator.scores.rewards(self.progress.best, "val")
        return len(known) == len(self.order) and min(known.values()) >= self.settings.scoring.perfect

    def random(self, step: int, purpose: str) -> random.Random:
        """Return a random generator that follows from seed, step and purpose alone."""
        return random.Random(f"{self.context.seed}/{self.context.name}/{step}/{purpose}")

    async def admit(
        self, child: PromptCandidate, parent: PromptCandidate, *, origin: Origin | None = None
    ) -> PromptCandidate | None:
        """Return the candidate with versions that rollouts can pin, or ``None`` if it may not be tried.

        A proposal that breaks a rule stays in the lineage with the reason. One that was tried and beaten before may be
        tried again when it is proposed again: chance may have been against it, and its rewards so far still count.
        """
        origin = origin or Origin()
        self.journal.proposed(child.id, evidence=origin.evidence, spent=origin.spent)
        known = self.lineage.get(child.id)
        if known is not None:
            if known.status != "beaten" or known.tries >= MAX_TRIES:
                return None
            return self.lineage.put(known.replace(status="proposed", tries=known.tries + 1))
        known_by = await self._identifiers()
        texts = child.instructions
        broken = [violation(texts[r.name], r, shown=origin.shown, identifiers=known_by) for r in self.rules]
        broken.append((await self._held_out()).violation(child.demonstrations) if child.demonstrations else "")
        reason = next((text for text in broken if text), "")
        report = GateReport(gate=STATIC, has_passed=not reason, step=child.step, reason=reason)
        self.journal.met(child.id, report)
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
        demonstrations: Demonstrations | None = None,
    ) -> PromptCandidate:
        """Return a candidate with these instructions, which is not in the lineage yet.

        Its demonstrations are those of its first parent where none are given.
        """
        shown = parents[0].demonstrations if demonstrations is None else {n: d for n, d in demonstrations.items() if d}
        like = {rules.name: rules.seed for rules in self.rules}
        whole = {n: demonstrated(text, shown.get(n, ()), like=like[n]) for n, text in texts.items()}
        return PromptCandidate(
            id=candidate_id(whole),
            texts=whole,
            demonstrations=shown,
            bare={name: texts[name] for name in shown},
            parents=tuple(parent.id for parent in parents),
            operator=operator,
            step=step,
            critique=critique,
        )

    async def ask_editor(self, questions: Sequence[tuple[str, str]]) -> list[Written]:
        """Return what the editor wrote for (request, seed) pairs."""
        answers = await self.editor.ask_all(questions)
        found: list[Written] = []
        for answer in answers:
            text = None if answer is None else extract(answer.text)
            if answer is not None:  # a model that does not answer is counted elsewhere
                self.progress.barren = 0 if text is not None else self.progress.barren + 1
            found.append(Written() if answer is None else Written(before_text(answer.text), text, answer.spent))
        return found

    def request(self, kind: str, *, name: str, **values: str) -> str:
        """Return a request to the editor about one resource, with the rules that its text must keep."""
        lines = next(rules for rules in self.rules if rules.name == name).words()
        if self.settings.demonstrations.most:
            lines.append("- Write no examples of tasks with their answers: they are chosen and added apart.")
        constraints = "\n".join(lines)
        return self.requests.text(kind, component=name, constraints=constraints, **values)

    def question_seed(self, step: int, purpose: str) -> str:
        """Return a seed that makes the same request in another step another question, with an answer of its own."""
        return f"{self.context.seed}/{self.context.name}/{step}/{purpose}"

    async def measure_whole(self, candidate: PromptCandidate, step: int) -> None:
        """Run the validation tasks that are not known yet; raises :class:`RunError` when not one can be scored."""
        await self.evaluator.measure([MeasureJob(candidate, "val", self.order)], step=step, purpose="whole")
        if not self.evaluator.scores.rewards(candidate.id, "val"):
            raise nothing_scored(len(self.order), self.evaluator.broken)

    async def race(
        self,
        entrants: Sequence[PromptCandidate],
        rival: PromptCandidate,
        *,
        rungs: Sequence[tuple[int, ...]],
        step: int,
        purpose: str,
        may_tie: bool = False,
    ) -> dict[str, Verdict]:
        """Race the entrants against the rival (:func:`agl_algo_apo.acceptance.race.race`) and note the verdicts."""
        verdicts = await race(self.evaluator, entrants, rival, rungs=rungs, step=step, purpose=purpose, may_tie=may_tie)
        for candidate, verdict in verdicts.items():
            self.note_gate(
                candidate,
                rival.id,
                gate=RACES[purpose],
                has_passed=verdict.has_won,
                split="val",
                tasks=verdict.tasks,
                step=step,
            )
        return verdicts

    def note_gate(
        self,
        candidate: str,
        rival: str,
        *,
        gate: str,
        has_passed: bool,
        split: Split,
        tasks: Sequence[int],
        step: int,
    ) -> None:
        """Note the outcome of a gate that compared a candidate with a rival on tasks of one split."""
        ours, theirs = (self.evaluator.scores.rewards(each, split, tasks) for each in (candidate, rival))
        report = GateReport(gate=gate, has_passed=has_passed, step=step, rival=rival)
        self.journal.met(candidate, compared(report, ours, theirs, tasks=tasks, within=self.evaluator.range))

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
        verdicts = await self.race(
            entrants, rival, rungs=self._rungs(entrants), step=step, purpose=purpose, may_tie=may_tie
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

    async def _promote(self, winner: PromptCandidate, rival: PromptCandidate, *, step: int, may_tie: bool) -> None:
        """Make a winner the best candidate; where its rival was another, it has to beat the best one first."""
        if rival.id != self.progress.best:
            verdicts = await self.race(
                [winner], self.best, rungs=self.rungs, step=step, purpose="crown", may_tie=may_tie
            )
            if not verdicts[winner.id].has_won:
                return
        self.progress.best = winner.id

    def _rungs(self, entrants: Sequence[PromptCandidate]) -> Sequence[tuple[int, ...]]:
        """Return the slices of a race; an entrant that runs again starts beyond those that decided it before."""
        again = [entrant for entrant in entrants if entrant.tries > 1]
        known = max((len(self.evaluator.scores.rewards(entrant.id, "val")) for entrant in again), default=0)
        return [rung for rung in self.rungs if len(rung) > known] or self.rungs[-1:]

    async def _held_out(self) -> HeldOut:
        """Return the marks of the validation tasks, test tasks included."""
        if self._marks is None:
            hidden = await self.evaluator.hidden_keys()
            self._marks = HeldOut.of(self.context.val, self.context.train, hidden=hidden)
        return self._marks

    async def _identifiers(self) -> frozenset[str]:
        """Return the words that belong to one training task each, of what the agent sees of it."""
        if self._known_by is None:
            hidden = await self.evaluator.hidden_keys()
            self._known_by = identifiers_of(self.context.train, self.context.val, hidden=hidden)
        return self._known_by
