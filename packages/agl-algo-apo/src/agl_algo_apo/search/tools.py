"""The tools of a search's improving steps: proposals and their static checks, requests, first measurements.

Everything here follows from the search's state and (seed, step, purpose), so a repeated step does the same.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from agl.contracts import AlgorithmContext
from agl_algo_apo.acceptance.static_checks import TextRules, ValidationMarks, identifiers_of, violation
from agl_algo_apo.measurement.evaluation import Evaluator, MeasureJob, nothing_scored
from agl_algo_apo.measurement.journal import STATIC, CheckReport, Journal
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
"""The largest number of trials of one candidate."""


class Written(NamedTuple):
    """An answer of the editor: the critique, the proposed text (``None`` if it has no text), and the cost."""

    critique: str = ""
    text: str | None = None
    spent: Spent = Spent()


class Origin(NamedTuple):
    """Where a proposal comes from.

    Attributes:
        shown: Texts of the tasks that the proposal's author saw.
        evidence: Ids of the rollouts that the proposal's author saw.
        spent: The cost of the requests for the proposal.
    """

    shown: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    spent: Spent = Spent()


class SearchTools:
    """Base of :class:`PromptSearch`, which sets the attributes before the first step."""

    context: AlgorithmContext
    evaluator: Evaluator
    budget: Budget
    plan: SpendingPlan
    requests: Requests
    editor: Optimizer
    critic: Optimizer
    rules: list[TextRules]
    order: tuple[int, ...]
    test: tuple[int, ...]
    rungs: list[tuple[int, ...]]

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.lineage = Lineage()
        self.progress = SearchProgress()
        self.result: Result | None = None
        self._known_by: frozenset[str] | None = None
        self._marks: ValidationMarks | None = None

    @property
    def journal(self) -> Journal:
        """The journal of all candidates."""
        return self.evaluator.journal

    @property
    def best(self) -> PromptCandidate:
        """The best candidate so far."""
        return self.lineage[self.progress.best]

    @property
    def winner(self) -> PromptCandidate:
        """The last best candidate that the gate called better than the first prompt; until then, the first prompt."""
        return self.lineage[self.progress.winner]

    @property
    def is_perfect(self) -> bool:
        """True if the best candidate has the perfect reward on every validation task."""
        known = self.evaluator.scores.rewards(self.progress.best, "val")
        return len(known) == len(self.order) and min(known.values()) >= self.settings.scoring.perfect

    def random(self, step: int, purpose: str) -> random.Random:
        """Return a random generator that depends only on the run's seed, the step and the purpose."""
        return random.Random(f"{self.context.seed}/{self.context.name}/{step}/{purpose}")

    async def screen(
        self, child: PromptCandidate, parent: PromptCandidate, *, origin: Origin | None = None
    ) -> PromptCandidate | None:
        """Return a proposal with versions that rollouts can pin; ``None`` if it may not be tried.

        A proposal that breaks a rule stays in the lineage with the reason. A proposal that was beaten before may be
        tried again if it is proposed again: it may have lost by chance, and its earlier rewards still count.
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
        broken.append((await self._validation_marks()).violation(child.demonstrations) if child.demonstrations else "")
        reason = next((text for text in broken if text), "")
        report = CheckReport(name=STATIC, has_passed=not reason, step=child.step, reason=reason)
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
        """Return a candidate with the instructions in ``texts``, without adding it to the lineage.

        By default it has the demonstrations of its first parent.
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
        """Return the editor's answers to (request, seed) pairs, in order."""
        answers = await self.editor.ask_all(questions)
        found: list[Written] = []
        for answer in answers:
            text = None if answer is None else extract(answer.text)
            if answer is not None:  # a model that does not answer is counted elsewhere
                self.progress.barren = 0 if text is not None else self.progress.barren + 1
                self.progress.unusable += text is None
            found.append(Written() if answer is None else Written(before_text(answer.text), text, answer.spent))
        return found

    def request(self, kind: str, *, name: str, **values: str) -> str:
        """Return a request to the editor about one resource; the request includes the rules for the resource's text."""
        lines = next(rules for rules in self.rules if rules.name == name).words()
        if self.settings.demonstrations.most:
            lines.append("- Write no examples of tasks with their answers: they are chosen and added apart.")
        constraints = "\n".join(lines)
        return self.requests.text(kind, component=name, constraints=constraints, **values)

    def question_seed(self, step: int, purpose: str) -> str:
        """Return the seed of a question; the same question in another step has another seed, and so a new answer."""
        return f"{self.context.seed}/{self.context.name}/{step}/{purpose}"

    async def measure_whole(self, candidate: PromptCandidate, step: int) -> None:
        """Measure a candidate on the validation tasks without a reward; raises :class:`RunError` if none is scored."""
        await self.evaluator.measure([MeasureJob(candidate, "val", self.order)], step=step, purpose="whole")
        if not self.evaluator.scores.rewards(candidate.id, "val"):
            raise nothing_scored(len(self.order), self.evaluator.broken)

    async def _validation_marks(self) -> ValidationMarks:
        """Return what identifies the validation tasks, test tasks included; computed once."""
        if self._marks is None:
            hidden = await self.evaluator.hidden_keys()
            self._marks = ValidationMarks.of(self.context.val, self.context.train, hidden=hidden)
        return self._marks

    async def _identifiers(self) -> frozenset[str]:
        """Return the words that identify a single training task, from the visible parts of all tasks; computed once."""
        if self._known_by is None:
            hidden = await self.evaluator.hidden_keys()
            self._known_by = identifiers_of(self.context.train, self.context.val, hidden=hidden)
        return self._known_by
