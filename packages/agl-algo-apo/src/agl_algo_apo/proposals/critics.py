"""Children of a parent: failures distributed to critics, the requests, and the proposals that may be tried."""

from collections.abc import Sequence
from typing import NamedTuple

from agl_algo_apo.acceptance.static_checks import task_text
from agl_algo_apo.proposals.evidence import EvidenceRun, evidence_text, live_failures, read_run
from agl_algo_apo.search.tools import Origin, SearchTools, Written
from agl_algo_apo.texts.lineage import PromptCandidate, resource_of

SHOWN = 4
"""The most failing runs that one critic is shown; more would make its request long and its advice vague."""


class Assignment(NamedTuple):
    """The basis of one child: the name of the text to change, and the training tasks whose failures its critic sees."""

    name: str
    tasks: tuple[int, ...]


class Critics:
    """Makes children of a parent from critiques of the parent's failures.

    Args:
        search: The search, whose tools it uses.
        asks_twice: True if critique and text are two requests.
    """

    def __init__(self, search: SearchTools, *, asks_twice: bool) -> None:
        self._search = search
        self._asks_twice = asks_twice

    def assign(self, failures: Sequence[int], parent: PromptCandidate, step: int) -> list[Assignment]:
        """Distribute the failures over the children, and assign the texts to change in turn."""
        names, count = list(parent.texts), self._search.settings.branch_factor
        assignments: list[Assignment] = []
        for k in range(count):
            name = names[(step + k) % len(names)]  # round robin over the texts, shifted by one in every step
            # D_k: every count-th failure from the k-th on, so that siblings learn from different failures; if there are
            # fewer failures than children, some share one.
            dealt = [failures[i] for i in range(k % len(failures), len(failures), count)]
            assignments.append(Assignment(name, tuple(dealt[:SHOWN])))
        shown = {task for assignment in assignments for task in assignment.tasks}
        self._search.progress.used.setdefault(parent.id, []).extend(sorted(shown))
        return assignments

    async def children(
        self, parent: PromptCandidate, assignments: Sequence[Assignment], step: int
    ) -> list[tuple[PromptCandidate, Assignment]]:
        """Request the children and return those that passed the static checks, each with its assignment."""
        search = self._search
        evidence = [await self._evidence(parent, assignment) for assignment in assignments]
        shown = [evidence_text(runs) for runs in evidence]
        ask = self._critiques_and_edits if self._asks_twice else self._improvements
        written = await ask(parent, assignments, shown, step)
        # Keyed by id, which is derived from the texts: children with the same text are one candidate, paid for once.
        screened: dict[str, tuple[PromptCandidate, Assignment]] = {}
        for assignment, runs, answer in zip(assignments, evidence, written, strict=True):
            if answer.text is None:
                continue
            texts = {**parent.instructions, assignment.name: answer.text}
            proposal = search.proposal([parent], texts, step=step, operator="edit", critique=answer.critique)
            origin = Origin(
                shown=tuple(task_text(search.context.train[task]) for task in assignment.tasks),
                evidence=tuple(run.measured.rollout for run in runs),
                spent=answer.spent,
            )
            child = await search.screen(proposal, parent, origin=origin)
            if child is not None:
                screened[child.id] = (child, assignment)
        return list(screened.values())

    async def _improvements(
        self, parent: PromptCandidate, assignments: Sequence[Assignment], evidence: Sequence[str], step: int
    ) -> list[Written]:
        """Request a critique g_k and a text p_k per assignment, both in one answer; all requests run at once."""
        questions: list[tuple[str, str]] = []
        for k, (a, shown) in enumerate(zip(assignments, evidence, strict=True)):
            request = self._search.request("improve", name=a.name, text=parent.instructions[a.name], evidence=shown)
            questions.append((request, self._search.question_seed(step, f"improve{k}")))
        return await self._search.ask_editor(questions)

    async def _critiques_and_edits(
        self, parent: PromptCandidate, assignments: Sequence[Assignment], evidence: Sequence[str], step: int
    ) -> list[Written]:
        """Request a critique from the critic per assignment, then a text from the editor."""
        search = self._search
        given = [(a.name, parent.instructions[a.name], shown) for a, shown in zip(assignments, evidence, strict=True)]
        asked: list[tuple[str, str]] = []
        for k, (name, text, shown) in enumerate(given):
            request = search.requests.text("critique", component=name, text=text, evidence=shown)
            asked.append((request, search.question_seed(step, f"critique{k}")))
        found = [Written() for _ in given]
        questions: dict[int, tuple[str, str]] = {}
        # g_k = critic(p, D_k); None if the model did not answer
        for k, critique in enumerate(await search.critic.ask_all(asked)):
            if critique is not None:
                name, text, shown = given[k]
                request = search.request("edit", name=name, text=text, critique=critique.text, evidence=shown)
                questions[k] = (request, search.question_seed(step, f"edit{k}"))
                found[k] = Written(critique.text, None, critique.spent)
        # p_k = edit(p, g_k); None if the answer contains no text
        for k, edit in zip(questions, await search.ask_editor(list(questions.values())), strict=True):
            found[k] = Written(found[k].critique, edit.text, found[k].spent.plus(edit.spent))
        return found

    async def _evidence(self, parent: PromptCandidate, assignment: Assignment) -> list[EvidenceRun]:
        name, scores = assignment.name, self._search.evaluator.scores
        like = next(rules.seed for rules in self._search.rules if rules.name == name)  # for its kind: template or JSON
        resource = resource_of(parent.texts[name], like)
        agents = self._search.settings.texts.roles.get(name, "")
        own = [scores.get(parent.id, "train", task) for task in assignment.tasks]
        # The parent's own failures come first; other algorithms' failures on the same tasks fill up the list.
        found = [*own, *(live_failures(self._search.progress, parent.id).get(task) for task in assignment.tasks)]
        measured = [m for m in found if m is not None][: 2 * SHOWN]
        return [await read_run(self._search.context, m, name=name, resource=resource, agents=agents) for m in measured]
