"""Children of a parent: failures dealt out to critics, their questions, and the proposals that may be tried."""

from collections.abc import Sequence
from typing import NamedTuple

from agl_algo_apo.acceptance.static_gate import task_text
from agl_algo_apo.proposals.evidence import EvidenceRun, evidence_text, read_run
from agl_algo_apo.proposals.shared_failures import live_failures
from agl_algo_apo.search.tools import Origin, SearchTools, Written
from agl_algo_apo.texts.lineage import PromptCandidate, resource_of

SHOWN = 4
"""Most failing runs that one critic is shown: more would make its request long and its advice vague."""


class Assignment(NamedTuple):
    """The basis of one child: the text that it changes, and the training tasks whose failures its critic sees."""

    name: str
    tasks: tuple[int, ...]


class Critics:
    """Makes children of a parent.

    Args:
        search: The search, whose tools it uses.
        asks_twice: Whether critique and text are two questions.
    """

    def __init__(self, search: SearchTools, *, asks_twice: bool) -> None:
        self._search = search
        self._asks_twice = asks_twice

    def assign(self, failures: Sequence[int], parent: PromptCandidate, step: int) -> list[Assignment]:
        """Deal the failures out to the children, and give each a text to change, in turn."""
        names, count = list(parent.texts), self._search.settings.branch_factor
        assignments: list[Assignment] = []
        for k in range(count):
            name = names[(step + k) % len(names)]  # round robin over the texts, shifted by one in every step
            # D_k: every count-th failure from the k-th on, so that siblings learn from different ones; with fewer
            # failures than children some share one.
            dealt = [failures[i] for i in range(k % len(failures), len(failures), count)]
            assignments.append(Assignment(name, tuple(dealt[:SHOWN])))
        shown = {task for assignment in assignments for task in assignment.tasks}
        self._search.progress.used.setdefault(parent.id, []).extend(sorted(shown))
        return assignments

    async def children(
        self, parent: PromptCandidate, assignments: Sequence[Assignment], step: int
    ) -> list[tuple[PromptCandidate, Assignment]]:
        """Return the proposals that passed the static gate, each with its assignment."""
        evidence = [await self._evidence(parent, assignment) for assignment in assignments]
        ask = self._critiques_and_edits if self._asks_twice else self._improvements
        # By id, which follows from the texts: two children with the same text are one candidate, paid for once.
        admitted: dict[str, tuple[PromptCandidate, Assignment]] = {}
        texts = [evidence_text(runs) for runs in evidence]
        for assignment, runs, written in zip(
            assignments, evidence, await ask(parent, assignments, texts, step), strict=True
        ):
            if written.text is not None:
                child = await self._admit_edit(parent, assignment, written, runs, step)
                if child is not None:
                    admitted[child.id] = (child, assignment)
        return list(admitted.values())

    async def _improvements(
        self, parent: PromptCandidate, assignments: Sequence[Assignment], evidence: Sequence[str], step: int
    ) -> list[Written]:
        """Return a critique g_k and a text p_k for each assignment, from one answer each; all are asked at once."""
        questions = [
            (
                self._search.request("improve", name=a.name, text=parent.instructions[a.name], evidence=shown),
                self._search.question_seed(step, f"improve{k}"),
            )
            for k, (a, shown) in enumerate(zip(assignments, evidence, strict=True))
        ]
        return await self._search.ask_editor(questions)

    async def _critiques_and_edits(
        self, parent: PromptCandidate, assignments: Sequence[Assignment], evidence: Sequence[str], step: int
    ) -> list[Written]:
        """Return the same from two questions each: to the critic, all at once, and then to the editor."""
        texts = [parent.instructions[assignment.name] for assignment in assignments]
        critiques = await self._search.critic.ask_all(  # g_k = critic(p, D_k); None where the model did not answer
            [
                (
                    self._search.requests.text("critique", component=assignment.name, text=text, evidence=shown),
                    self._search.question_seed(step, f"critique{k}"),
                )
                for k, (assignment, text, shown) in enumerate(zip(assignments, texts, evidence, strict=True))
            ]
        )
        asked = {k: critique for k, critique in enumerate(critiques) if critique is not None}
        edits = await self._search.ask_editor(  # p_k = edit(p, g_k); None where the answer holds no text
            [
                (
                    self._search.request(
                        "edit", name=assignments[k].name, text=texts[k], critique=critique.text, evidence=evidence[k]
                    ),
                    self._search.question_seed(step, f"edit{k}"),
                )
                for k, critique in asked.items()
            ]
        )
        edited = dict(zip(asked, edits, strict=True))
        return [
            Written(critique.text, edited[k].text, critique.spent.plus(edited[k].spent))
            if (critique := asked.get(k)) is not None
            else Written()
            for k in range(len(assignments))
        ]

    async def _admit_edit(
        self,
        parent: PromptCandidate,
        assignment: Assignment,
        written: Written,
        runs: Sequence[EvidenceRun],
        step: int,
    ) -> PromptCandidate | None:
        texts = {**parent.instructions, assignment.name: written.text or ""}
        child = self._search.proposal([parent], texts, step=step, operator="edit", critique=written.critique)
        origin = Origin(
            shown=tuple(task_text(self._search.context.train[task]) for task in assignment.tasks),
            evidence=tuple(run.measured.rollout for run in runs),
            spent=written.spent,
        )
        return await self._search.admit(child, parent, origin=origin)

    async def _evidence(self, parent: PromptCandidate, assignment: Assignment) -> list[EvidenceRun]:
        name, scores = assignment.name, self._search.evaluator.scores
        like = next(rules.seed for rules in self._search.rules if rules.name == name)  # for its kind: template or JSON
        resource = resource_of(parent.texts[name], like)
        agents = self._search.settings.texts.roles.get(name, "")
        own = [scores.get(parent.id, "train", task) for task in assignment.tasks]
        # The parent's own failures come first; those of other algorithms' rollouts on the same tasks fill up.
        found = [*own, *(live_failures(self._search.progress, parent.id).get(task) for task in assignment.tasks)]
        measured = [m for m in found if m is not None][: 2 * SHOWN]
        return [await read_run(self._search.context, m, name=name, resource=resource, agents=agents) for m in measured]
