"""The final measurement: the rewards that chose a winner flatter it, so fresh rewards are reported.

A candidate that leads after many comparisons on one set of tasks was partly lucky on it (the winner's curse), so its
mean there is biased upwards. Rollouts that no choice has used have no such bias: their mean is an honest estimate, and
their paired difference to the first prompt an honest gain (`estimates.py`). Their tasks are drawn at random, because
those of the first slices of races have influenced the choice most, and texts that suit them got further.

If the winner does worse than the first prompt on the fresh rollouts, the first prompt stays. If the search has no
winner, its best candidate is measured, and becomes the winner if the gate calls it better on all rewards, the first and
the fresh ones (`proof.py`).

Fresh rollouts do not show how far a text suits only these tasks. So if there are enough validation tasks, some of them
take no part in the search (`test`), and the report uses those.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from agl.acceptance import odds_text
from agl.schemas import Record
from agl_algo_apo.acceptance.proof import gate_of, is_proven
from agl_algo_apo.measurement.estimates import Estimate, estimate, exactly_nothing
from agl_algo_apo.measurement.evaluation import Evaluator, MeasureJob
from agl_algo_apo.measurement.scores import FRESH, Split
from agl_algo_apo.search.budget import BudgetExhaustedError
from agl_algo_apo.search.tools import SearchTools
from agl_algo_apo.texts.lineage import PromptCandidate

How = Literal["test tasks", "fresh rollouts", "first measurement", "selection"]
"""Names the rewards from which a score is computed.

``test tasks``: rewards on tasks that were not used for selection. ``fresh rollouts``: fresh rewards on validation
tasks. ``first measurement``: the first rewards, which are unbiased if they selected nothing. ``selection``: the rewards
that selected the winner, and flatter it.
"""


_SOURCES: Mapping[How, str] = {
    "test tasks": "{n} test tasks, which took no part in the search",
    "fresh rollouts": "fresh rollouts of {n} validation tasks",
    "first measurement": "the first measurement of {n} validation tasks",
    "selection": "the rollouts that selected it, which flatter it, of {n} validation tasks",
}


class FinalTasks(NamedTuple):
    """The tasks of the final measurement, by split and position, and the ``repeat`` numbers of its rollouts."""

    split: Split
    tasks: tuple[int, ...]
    repeats: tuple[int, ...] = (FRESH,)


class Result(Record, frozen=True, kw_only=True):
    """The result of a search.

    Attributes:
        winner: Id of the winner; that of the first prompt if nothing is better.
        score: Mean reward of the winner.
        seed_score: Mean reward of the first prompt, on the same tasks.
        gain: Mean of the paired differences between winner and first prompt.
        is_fresh: True if these rewards did not select the winner, because they are from fresh rollouts or there was
            nothing to select. False if the budget had no room for fresh rollouts.
        how: The rewards from which ``score``, ``seed_score`` and ``gain`` are computed.
        verdict: The gate's verdict on winner or best candidate against the first prompt, over all rewards.
        beaten: Id of the best candidate if the first prompt stays though there is one; else ``""``.
        beaten_score: Mean reward of that candidate, on the same tasks.
    """

    winner: str
    score: Estimate
    seed_score: Estimate
    gain: Estimate
    is_fresh: bool = True
    how: How = "fresh rollouts"
    verdict: str = ""
    beaten: str = ""
    beaten_score: Estimate | None = None

    @property
    def words(self) -> str:
        """The result as one sentence, for users."""
        where = f"on {_SOURCES[self.how]}".format(n=self.score.n)
        if self.beaten_score is not None:
            return (
                f"the first prompt stays, with a score of {self.seed_score.words}: the best candidate, "
                f"{self.beaten}, has {self.beaten_score.words}, {where}; over all tasks, {self.verdict}"
            )
        if self.gain == exactly_nothing(self.gain.n):
            return f"nothing better than the first prompt was found; its score is {self.seed_score.words}"
        score = f"score {self.score.words} against {self.seed_score.words} of the first prompt, {where}"
        return f"{score}; over all tasks, {self.verdict}"


async def measure_again(search: SearchTools, final: FinalTasks, step: int) -> Result | None:
    """Run the finalist and the first prompt on ``final``, and return the result.

    The finalist is the winner, or else the best candidate. Returns ``None`` if finalist and first prompt have no
    measured task in common, because the budget ended right after other resources had changed.
    """
    evaluator, progress = search.evaluator, search.progress
    seed = search.lineage[progress.seed]
    finalist = search.best if progress.winner == seed.id else search.winner
    if finalist == seed:  # nothing to choose, and nothing is paid
        return _result(evaluator, seed, seed, how="first measurement")
    try:
        jobs = [MeasureJob(c, final.split, final.tasks, repeat) for c in (finalist, seed) for repeat in final.repeats]
        await evaluator.measure(jobs, step=step, purpose="final")
    except BudgetExhaustedError:
        pass  # the choice stands on the rewards that were paid so far
    gate = gate_of(search, finalist)
    how: How = "test tasks" if final.split == "test" else "fresh rollouts"
    if not all(rewards_by(evaluator, candidate.id, how) for candidate in (finalist, seed)):
        how = "selection"
    proven = finalist.id == progress.winner or is_proven(search, gate)
    needed = "" if proven else f"; a proof takes evidence of {odds_text(1 / gate.error)}"
    return _result(evaluator, finalist, seed, how=how, proven=proven, verdict=gate.words + needed)


def _result(
    evaluator: Evaluator,
    finalist: PromptCandidate,
    seed: PromptCandidate,
    *,
    how: How,
    proven: bool = False,
    verdict: str = "",
) -> Result | None:
    """Return the result, with the finalist as the winner if it is proven and does not do worse than the seed."""
    rewards = {c.id: rewards_by(evaluator, c.id, how) for c in (finalist, seed)}
    # Only tasks measured for both: scores over different tasks would not be consistent with the gain.
    common = sorted(rewards[finalist.id].keys() & rewards[seed.id].keys())
    if not common:
        return None
    ours, theirs = ([rewards[c.id][task] for task in common] for c in (finalist, seed))
    score, seed_score = (estimate(values, evaluator.range) for values in (ours, theirs))
    nothing, is_fresh = exactly_nothing(len(common)), how != "selection"
    if finalist != seed and (not proven or score.mean < seed_score.mean):
        return Result(
            winner=seed.id,
            score=seed_score,
            seed_score=seed_score,
            gain=nothing,
            is_fresh=is_fresh,
            how=how,
            verdict=verdict,
            beaten=finalist.id,
            beaten_score=score,
        )
    gains = [our - their for our, their in zip(ours, theirs, strict=True)]
    return Result(
        winner=finalist.id,
        score=score,
        seed_score=seed_score,
        gain=nothing if finalist == seed else estimate(gains, evaluator.range.of_differences),
        is_fresh=is_fresh,
        how=how,
        verdict=verdict,
    )


def rewards_by(evaluator: Evaluator, candidate: str, how: How) -> Mapping[int, float]:
    """Return a candidate's rewards by task, from the source that ``how`` names."""
    if how == "fresh rollouts":
        return evaluator.scores.fresh(candidate)
    return evaluator.scores.rewards(candidate, "test" if how == "test tasks" else "val")
