"""Random search: rewrites without evidence, kept if they are better. Every other optimiser has to beat this one.

One step: the editor rewrites one text of the best candidate without having seen a single run; the proposal passes the
same static gate and the same race as those of `apo.py`. It pays nothing for training tasks, for it learns from none.
So what another optimiser gains over this one at the same budget is what its evidence is worth.
"""

from typing import TYPE_CHECKING

from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.search.budget import BudgetLimits, Prices
from agl_algo_apo.search.search import PromptSearch
from agl_algo_apo.search.settings import Preset, Publish, SearchSettings
from agl_algo_apo.search.tools import Origin

if TYPE_CHECKING:
    from agl_algo_apo.texts.lineage import PromptCandidate

MAX_IDLE = 8
"""The search ends after so many rewrites in a row that could not be tried."""


class RandomSearch(PromptSearch):
    """Tunes prompts and other texts of an agent by guessing.

    Args:
        optimizer: The model that rewrites; as for `apo`, like all that follow.
        budget: Rollouts, a preset, or limits.
        prices: Prices for a budget in money.
        beam_rounds: Most steps; 0 for no limit but the budget.
        val_batch_size: Validation tasks in the first slice of a race.
        patience: Steps without an improvement that end the search.
        perfect_score: The best reward that a task can get; a rollout that gets more ends the run with an error.
        failure_reward: The reward of a rollout in which the agent failed or ran out of time.
        reserve: Share of the rollouts that is held back for the final measurement.
        test: Share of the validation tasks that take no part in the search and give the reported score; none do where
            these are fewer than 8.
        publish: Make the best texts live at every ``improvement``, or only at the ``end``.
        invariants: By resource, texts that must stay in it.
        filled: Placeholders that the agent fills with something else than a key of the task.
        max_chars: Longest text in characters; 0 for four times the first one's length, and at least 4000.
        requests: A file of your own for the request ``rewrite``.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        optimizer: str | OptimizerSettings,
        budget: int | Preset | BudgetLimits = "light",
        prices: Prices | None = None,
        beam_rounds: int = 0,
        val_batch_size: int = 8,
        patience: int = 20,
        perfect_score: float = 1.0,
        failure_reward: float = 0.0,
        reserve: float = 0.1,
        test: float = 0.25,
        publish: Publish = "improvement",
        invariants: dict[str, tuple[str, ...]] | None = None,
        filled: tuple[str, ...] = (),
        max_chars: int = 0,
        requests: dict[str, str] | None = None,
    ) -> None:
        settings = SearchSettings(
            optimizer=optimizer,
            budget=budget,
            prices=prices or Prices(),
            branch_factor=1,
            beam_rounds=beam_rounds,
            val_batch_size=val_batch_size,
            patience=patience,
            perfect_score=perfect_score,
            failure_reward=failure_reward,
            reserve=reserve,
            test=test,
            publish=publish,
            invariants=invariants or {},
            filled=tuple(filled),
            max_chars=max_chars,
            requests=requests or {},
        )
        super().__init__(settings, algorithm="random", calls=1)

    async def improve(self, step: int) -> None:
        """Rewrite one text and race the result against the best candidate."""
        best, names = self.best, list(self.best.texts)
        name = names[step % len(names)]  # the texts take turns
        request = self.request("rewrite", name=name, text=best.texts[name])
        written = (await self.ask_editor([(request, self.question_seed(step, "rewrite"))]))[0]
        child: PromptCandidate | None = None
        if written.text is not None:  # the answer held a text; the static gate may still refuse it
            texts = {**best.texts, name: written.text}
            proposal = self.proposal([best], texts, step=step, operator="rewrite", critique=written.critique)
            child = await self.admit(proposal, best, origin=Origin(spent=written.spent))
        if child is None:
            self.progress.idle += 1
            if self.progress.idle >= MAX_IDLE:
                self.progress.stop("no_proposals")
            return
        self.progress.idle = 0
        await self.contest([child], best, step=step, purpose="race")
