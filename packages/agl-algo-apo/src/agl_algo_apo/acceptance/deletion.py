"""Deletes useless changes of the best candidate: each change has to earn its place on validation tasks.

A change is a line that was added, or a group of lines that replaced others; a text of one line is split into sentences.
A race without the change shows whether it earns its place. Lines that a merge carried along, or that fit only training
tasks, bring nothing on tasks that their author did not see.
"""

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise

from agl.schemas import Record
from agl_algo_apo.acceptance.contest import Verdict, contest, race
from agl_algo_apo.measurement.evaluation import MeasureJob
from agl_algo_apo.search.tools import SearchTools
from agl_algo_apo.texts.demonstrations import without_demonstrations
from agl_algo_apo.texts.lineage import PromptCandidate


class Change(Record, frozen=True, kw_only=True):
    """One change of a text.

    Attributes:
        key: The new lines, which identify the change in later texts too.
        without: The text with this change undone.
    """

    key: str
    without: str


def changes(first: str, text: str) -> list[Change]:
    """Return the changes that turn the text ``first`` into ``text``, in order; pure deletions are left out."""
    pattern = r"(?<=\n)" if "\n" in text.strip() else r"(?<=[.!?]) +(?=\S)"
    base, parts = (_parts(pattern, whole) for whole in (first, text))
    found: list[Change] = []
    matcher = difflib.SequenceMatcher(a=base, b=parts, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        # Added lines are undone one by one; lines that replaced others only together.
        spans = [(j, j + 1) for j in range(j1, j2)] if tag == "insert" else [(j1, j2)] if tag == "replace" else []
        for start, stop in spans:
            key = "".join(parts[start:stop]).strip()
            if key:
                found.append(Change(key=key, without="".join([*parts[:start], *base[i1:i2], *parts[stop:]])))
    return found


def without(first: str, text: str, keys: frozenset[str]) -> str:
    """Return ``text`` with the changes that have these keys undone, so that ``first`` shows in their place."""
    for key in sorted(keys):
        text = next((change.without for change in changes(first, text) if change.key == key), text)
    return text


def _parts(pattern: str, text: str) -> list[str]:
    """Split a text; each part includes the space after it, so that joining the parts gives the text."""
    cuts = [0, *(match.end() for match in re.finditer(pattern, text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts) if start < stop]


DELETE_AFTER = 2
"""Steps without an improvement after which unproven changes are undone."""


class Deletion:
    """Removes useless parts of the best candidate.

    Args:
        search: The search, whose tools and progress it uses.
    """

    def __init__(self, search: SearchTools) -> None:
        self._search = search

    def unproven(self) -> dict[str, list[Change]]:
        """Return the changes and demonstrations of the best candidate that have not earned their place, by resource."""
        if self._search.progress.best in self._search.progress.deletions_tried:
            return {}
        first, proven = self._search.lineage[self._search.progress.seed].texts, self._search.progress.proven
        best = self._search.best
        found = {name: changes(first[name], text) for name, text in best.instructions.items()}
        for name, shown in best.demonstrations.items():
            found[name] += [Change(key=each.key, without=best.instructions[name]) for each in shown]
        left = {n: [c for c in known if c.key not in proven.get(n, ())] for n, known in found.items()}
        return {name: unproven for name, unproven in left.items() if unproven}

    def is_due(self, step: int) -> bool:
        """Return true if this step should try deletions: regularly, if stuck, and before the budget ends."""
        unproven = sum(map(len, self.unproven().values()))
        if not self._search.settings.delete_every or not unproven:
            return False
        left = self._search.budget.rollouts_left()
        limit = self._search.plan.limits.rollouts
        # A useful change is recognised on half of the tasks or less, and a useless one takes all of them. One more step
        # has to fit in as well. But no more than a fifth of the budget is reserved, because a text without improvements
        # needs none.
        needed = (3 + unproven / 2) * len(self._search.order)
        is_late = left is not None and limit is not None and left < min(needed, limit / 5)
        return is_late or self._search.progress.stale >= DELETE_AFTER or step % self._search.settings.delete_every == 0

    async def run(self, step: int) -> None:
        """Try the best candidate without each unproven change, each alone, then without all useless ones together."""
        best, undone = self._search.best, dict[str, tuple[str, str]]()
        for name, unproven in self.unproven().items():
            for change in unproven:
                child = await self._without(best, name, change, step)
                if child is not None:  # else the rest breaks a rule, or was beaten often enough
                    undone[child.id] = (name, change.key)
        entrants = [self._search.lineage[child] for child in undone]
        verdicts = await self._try_without(entrants, best, step)
        if not verdicts:  # infrastructure broke all of it
            return
        useless: list[PromptCandidate] = []
        for entrant in entrants:
            (name, key), verdict = undone[entrant.id], verdicts[entrant.id]
            if entrant.status != "pool":
                entrant = self._search.lineage.put(
                    entrant.replace(status="beaten", reason=f"without {key!r}: {verdict.words}")
                )
            if verdict.has_won:
                useless.append(entrant)
            else:
                self._search.progress.proven.setdefault(name, []).append(key)
        self._search.progress.deletions_tried.append(best.id)  # each candidate once, whatever comes of it
        if useless:  # the one that costs least is paid already, and stays where the budget has no room for the others
            worst = max(useless, key=lambda entrant: verdicts[entrant.id].difference)
            await contest(self._search, [worst], best, step=step, purpose="undo", may_tie=True)
            await self._undo([undone[entrant.id] for entrant in useless], step)

    async def _try_without(
        self, entrants: Sequence[PromptCandidate], best: PromptCandidate, step: int
    ) -> dict[str, Verdict]:
        """Race texts with one change undone against the best text.

        The best text's rewards favour it and each of its changes. So it is measured again, and then every text that
        lost by little or was beaten before.
        """
        before = len(self._search.evaluator.scores)
        await self._measure_once_more([best], step, "prune-best")
        if len(self._search.evaluator.scores) == before and not self._search.progress.is_steady:
            return {}
        verdicts = await race(
            self._search, entrants, best, rungs=self._search.rungs, step=step, purpose="prune", may_tie=True
        )
        lost = [entrant for entrant in entrants if not verdicts[entrant.id].has_won]
        doubtful = [e for e in lost if e.status == "pool" or verdicts[e.id].n == len(self._search.order)]
        await self._measure_once_more(doubtful, step, "prune-again")
        return verdicts | await race(
            self._search, doubtful, best, rungs=self._search.rungs[-1:], step=step, purpose="doubtful", may_tie=True
        )

    async def _measure_once_more(self, candidates: Sequence[PromptCandidate], step: int, purpose: str) -> None:
        if not self._search.progress.is_steady:
            next_repeat = self._search.evaluator.scores.next_repeat
            jobs = [MeasureJob(c, "val", self._search.order, next_repeat(c.id)) for c in candidates]
            await self._search.evaluator.measure(jobs, step=step, purpose=purpose)

    async def _undo(self, useless: Sequence[tuple[str, str]], step: int) -> None:
        """Race the best candidate against a copy in which all these changes are undone."""
        best, first = self._search.best, self._search.lineage[self._search.progress.seed].texts
        keys = {name: frozenset(key for owner, key in useless if owner == name) for name in best.texts}
        texts = {name: without(first[name], text, keys[name]) for name, text in best.instructions.items()}
        shown = without_demonstrations(best.demonstrations, keys)
        child = self._search.proposal([best], texts, step=step, operator="delete", demonstrations=shown)
        if len(useless) > 1 and (screened := await self._search.screen(child, best)) is not None:
            await contest(self._search, [screened], best, step=step, purpose="delete", may_tie=True)

    async def _without(self, best: PromptCandidate, name: str, change: Change, step: int) -> PromptCandidate | None:
        texts = {**best.instructions, name: change.without}
        shown = without_demonstrations(best.demonstrations, {name: (change.key,)})
        child = self._search.proposal([best], texts, step=step, operator="delete", demonstrations=shown)
        known = self._search.lineage.get(child.id)  # such as the parent that it was better than by chance
        return known if known is not None and known.status == "pool" else await self._search.screen(child, best)
