"""Random search: rewrites without evidence, kept if they are better. Every other optimiser has to beat this one.

One step: the editor rewrites one text of the best candidate without having seen any run. The proposal passes the same
static checks and the same race as in `apo.py`. It pays nothing for training tasks, because it learns from none. So
another optimiser's gain over this one at the same budget is the value of its evidence.
"""

from typing import TYPE_CHECKING

from agl_algo_apo.acceptance.contest import contest
from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.search.budget import BudgetLimits
from agl_algo_apo.search.search import PromptSearch
from agl_algo_apo.search.settings import SCORING, TEXTS, Preset, Publish, Scoring, SearchSettings, Texts
from agl_algo_apo.search.tools import Origin

if TYPE_CHECKING:
    from agl_algo_apo.texts.lineage import PromptCandidate

MAX_IDLE = 8
"""The search ends after this many consecutive rewrites that could not be tried."""


class RandomSearch(PromptSearch):
    """Tunes prompts and other texts of an agent by guessing.

    Args:
        optimizer: The model that rewrites; this and all other parameters are as for `apo`.
        budget: Rollouts, a preset, or limits.
        beam_rounds: The most steps; 0 for no limit but the budget.
        val_batch_size: Validation tasks in the first slice of a race.
        patience: Consecutive steps without an improvement that end the search.
        scoring: The scale of rewards, the final measurement and the error: ``perfect``, ``failure``, ``reserve``,
            ``test``, ``error``.
        publish: Make texts live at every proven ``improvement``, or only at the ``end``.
        texts: The rules for texts: ``invariants``, ``filled``, ``max_chars``.
        requests: A file that replaces the request ``rewrite``.
    """

    def __init__(
        self,
        *,
        optimizer: str | OptimizerSettings,
        budget: int | Preset | BudgetLimits = "light",
        beam_rounds: int = 0,
        val_batch_size: int = 8,
        patience: int = 20,
        scoring: Scoring = SCORING,
        publish: Publish = "improvement",
        texts: Texts = TEXTS,
        requests: dict[str, str] | None = None,
    ) -> None:
        settings = SearchSettings.checked(
            "random",
            optimizer=optimizer,
            budget=budget,
            # One proposal per step: there is no evidence that several could share.
            branch_factor=1,
            beam_rounds=beam_rounds,
            val_batch_size=val_batch_size,
            patience=patience,
            scoring=scoring,
            publish=publish,
            texts=texts,
            requests=requests or {},
        )
        super().__init__(settings, algorithm="random", calls=1)

    async def improve(self, step: int) -> None:
        """Rewrite one text and race the result against the best candidate."""
        best, names = self.best, list(self.best.texts)
        # One text at a time: of two changes that arrive together, a race could not say which one helped.
        name = names[step % len(names)]  # the texts take turns
        # The request holds the text alone, without a run, a reward or a critique: the only difference from `apo`.
        request = self.request("rewrite", name=name, text=best.texts[name])
        # The seed of the question follows from the step, so a repeated step finds the answer that is already paid for.
        written = (await self.ask_editor([(request, self.question_seed(step, "rewrite"))]))[0]
        child: PromptCandidate | None = None
        if written.text is not None:  # the answer held a text; the static checks may still refuse it
            texts = {**best.texts, name: written.text}
            proposal = self.proposal([best], texts, step=step, operator="rewrite", critique=written.critique)
            child = await self.screen(proposal, best, origin=Origin(spent=written.spent))
        # An unusable or refused rewrite has cost a call but no rollout. After many in a row the model has run out of
        # ideas.
        if child is None:
            self.progress.idle += 1
            if self.progress.idle >= MAX_IDLE:
                self.progress.stop("no_proposals")
            return
        self.progress.idle = 0
        # The race that all optimisers here use: growing slices of validation tasks, on which the child is compared with
        # the best candidate in pairs. Races and budgets are equal, so the gains of two optimisers differ by their
        # proposals.
        await contest(self, [child], best, step=step, purpose="race")
