"""Draws the demonstrations of new candidates from good runs."""

import random
from collections.abc import Sequence

from agl.schemas import PromptTemplate
from agl_algo_apo.proposals.critics import SHOWN, Assignment
from agl_algo_apo.proposals.good_runs import GoodRun, good_runs, read_demonstration
from agl_algo_apo.search.tools import Origin, SearchTools
from agl_algo_apo.texts.demonstrations import Demonstration, is_escapable
from agl_algo_apo.texts.lineage import PromptCandidate, resource_of
from agl_algo_apo.texts.messages import messages_of

DEMONSTRATE_EVERY = 3
"""Every so many steps demonstrations are drawn instead of instructions written; the first time in step 4."""


class Demonstrator:
    """Makes children that show other demonstrations than their parent, and have its instructions.

    Args:
        search: The search, whose tools it uses.
    """

    def __init__(self, search: SearchTools) -> None:
        self._search = search

    def is_due(self, step: int) -> bool:
        """Return whether this step draws demonstrations."""
        return self._search.settings.demonstrations.most > 0 and step % DEMONSTRATE_EVERY == 1

    async def children(
        self, parent: PromptCandidate, failures: Sequence[int], step: int
    ) -> list[tuple[PromptCandidate, Assignment]]:
        """Return children that passed the static gate, each with the training tasks of its paired gate.

        These are failures of the parent, and no demonstration comes from one of them.
        """
        tasks, names = tuple(failures[:SHOWN]), self._prompts()
        pool = self._pool(parent, exclude=tasks)
        children: dict[str, tuple[PromptCandidate, Assignment]] = {}
        for k in range(self._search.settings.branch_factor if names and pool else 0):
            name = names[(step // DEMONSTRATE_EVERY + k) % len(names)]
            shown = await self._drawn(parent, name, pool, self._search.random(step, f"demonstrations {k}"))
            child = await self._admit(parent, name, shown, step)
            if child is not None:
                children[child.id] = (child, Assignment(name, tasks))
        return list(children.values())

    def _prompts(self) -> list[str]:
        """Return the names of the resources that can hold demonstrations: templates and messages, no other JSON."""
        return [
            rules.name
            for rules in self._search.rules
            if isinstance(rules.seed, PromptTemplate) or messages_of(rules.seed)
        ]

    def _pool(self, parent: PromptCandidate, *, exclude: Sequence[int]) -> list[GoodRun]:
        mean = self._search.evaluator.mean(parent.id, "train")
        found = good_runs(self._search.lineage.all(), self._search.evaluator.scores, above=mean)
        return [run for run in found if run.task not in exclude]

    async def _drawn(
        self, parent: PromptCandidate, name: str, pool: Sequence[GoodRun], draw: random.Random
    ) -> tuple[Demonstration, ...]:
        """Return a random part of the parent's demonstrations, filled up with others from the pool."""
        settings, had = self._search.settings, parent.demonstrations.get(name, ())
        shown = draw.sample(had, draw.randint(0, len(had)))
        left = settings.demonstrations.max_chars - sum(len(each.text) for each in shown)
        # At random, but runs with a better reward first: an answer that is right in part shows its mistakes as well.
        for run in sorted(draw.sample(pool, len(pool)), key=lambda run: -run.measured.reward):
            if len(shown) >= settings.demonstrations.most:
                break
            if run.task in {each.task for each in shown}:
                continue
            found = await self._read(run, name)
            if found is not None and len(found.text) <= left:
                shown.append(found)
                left -= len(found.text)
        return tuple(shown)

    async def _read(self, run: GoodRun, name: str) -> Demonstration | None:
        like = next(rules.seed for rules in self._search.rules if rules.name == name)
        resource = resource_of(run.candidate.texts[name], like)
        found = await read_demonstration(self._search.context, run, resource=resource)
        return found if found is not None and is_escapable(found, like=like) else None

    async def _admit(
        self, parent: PromptCandidate, name: str, shown: Sequence[Demonstration], step: int
    ) -> PromptCandidate | None:
        child = self._search.proposal(
            [parent],
            parent.instructions,
            step=step,
            operator="demonstrate",
            demonstrations={**parent.demonstrations, name: tuple(shown)},
        )
        origin = Origin(evidence=tuple(each.rollout for each in shown))
        return await self._search.admit(child, parent, origin=origin)
