"""The final measurement: the rewards that chose a winner flatter it, so fresh ones are reported.

Whoever leads after many comparisons on one set of tasks was partly lucky on it (the winner's curse), so its mean there
is biased upwards. Rollouts that no choice has looked at have no such bias: their mean is an honest estimate, and the
paired difference to the first prompt an honest gain, with Student's interval (`evaluation.estimate`).

The choice among the finalists uses all rewards, the first and the fresh ones, for more data choose better. To keep the
fresh ones nearly unbiased all the same, the runner-up replaces the best one only where it leads by a standard error.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

from agl.schemas import Record
from agl_algo_apo.budget import BudgetExhaustedError
from agl_algo_apo.candidates import Lineage, PromptCandidate
from agl_algo_apo.evaluation import FRESH, Estimate, Evaluator, MeasureJob, estimate

How = Literal["fresh rollouts", "first measurement", "selection"]
"""The rewards that a score is made of: fresh ones; those of the first measurement, which flatter nothing where nothing
was selected by them; or those of the selection, which flatter what they selected."""


class Result(Record, frozen=True, kw_only=True):
    """The result of a search.

    Attributes:
        winner: Id of the winner; that of the first prompt where nothing is better.
        score: Mean reward of the winner.
        seed_score: Mean reward of the first prompt, on the same tasks.
        gain: Mean of the paired differences of the two.
        is_fresh: Whether these rewards did not select the winner: they are from fresh rollouts, or there was nothing
            to select. It is false where the budget had no room for fresh rollouts.
        how: The rewards that all three are made of.
    """

    winner: str
    score: Estimate
    seed_score: Estimate
    gain: Estimate
    is_fresh: bool = True
    how: How = "fresh rollouts"

    @property
    def words(self) -> str:
        """The result in one line."""
        # Equal texts have a gain of exactly zero, with an interval of no width.
        if self.gain == Estimate(mean=0.0, low=0.0, high=0.0, n=self.gain.n):
            return f"nothing better than the first prompt was found; its score is {_interval(self.seed_score)}"
        source = "fresh rollouts" if self.is_fresh else "the rollouts that selected it, which flatter it"
        return (
            f"score {_interval(self.score)} against {_interval(self.seed_score)} of the first prompt, "
            f"on {source} of {self.score.n} validation tasks"
        )


async def measure_again(
    evaluator: Evaluator,
    lineage: Lineage,
    *,
    best: PromptCandidate,
    seed: PromptCandidate,
    order: Sequence[int],
    size: int,
    step: int,
) -> Result | None:
    """Run the best, the runner-up and the seed again on ``size`` tasks, choose among them, and return the result.

    The choice uses all rewards; the report uses the fresh ones alone. The seed wins a tie. Returns ``None`` where no
    task is known for both winner and seed, because the budget ended right after other resources had changed.
    """
    # By id, so that one who is several of these runs once; in this order, for the best one is to be beaten.
    finalists = list({c.id: c for c in (best, *_runner_up(evaluator, lineage, best, seed), seed)}.values())
    tasks = tuple(sorted(order[:size]))
    is_fresh = True
    if finalists != [seed]:  # with the first prompt alone there is nothing to choose, and nothing is paid
        try:
            jobs = [MeasureJob(candidate, "val", tasks, FRESH) for candidate in finalists]
            await evaluator.measure(jobs, step=step, purpose="final")
        except BudgetExhaustedError:
            is_fresh = False  # the choice stands on the rewards that were paid so far
    winner = _winner({candidate.id: _all_rewards(evaluator, candidate) for candidate in finalists}, finalists, seed)
    fresh = {c.id: evaluator.scores.fresh(c.id, "val") for c in (winner, seed)}
    is_fresh = is_fresh and (finalists == [seed] or all(fresh.values()))
    uses_fresh = is_fresh and finalists != [seed]
    rewards = fresh if uses_fresh else {c.id: evaluator.scores.rewards(c.id, "val") for c in (winner, seed)}
    # Only tasks that both were measured on: scores over different tasks would not add up to the gain.
    common = sorted(rewards[winner.id].keys() & rewards[seed.id].keys())
    if not common:
        return None
    return Result(
        winner=winner.id,
        score=estimate([rewards[winner.id][task] for task in common]),
        seed_score=estimate([rewards[seed.id][task] for task in common]),
        gain=estimate([rewards[winner.id][task] - rewards[seed.id][task] for task in common]),
        is_fresh=is_fresh,
        how="fresh rollouts" if uses_fresh else "first measurement" if is_fresh else "selection",
    )


def _runner_up(
    evaluator: Evaluator, lineage: Lineage, best: PromptCandidate, seed: PromptCandidate
) -> list[PromptCandidate]:
    others = [c for c in lineage.pool() if c.id not in (best.id, seed.id) and evaluator.scores.rewards(c.id, "val")]
    return sorted(others, key=lambda c: evaluator.mean(c.id, "val"), reverse=True)[:1]


def _all_rewards(evaluator: Evaluator, candidate: PromptCandidate) -> dict[int, float]:
    """Return for each task the mean of its first and its fresh reward, or the one that is known."""
    first = evaluator.scores.rewards(candidate.id, "val")
    fresh = evaluator.scores.fresh(candidate.id, "val")
    return {t: fmean(r[t] for r in (first, fresh) if t in r) for t in sorted(first.keys() | fresh.keys())}


def _winner(
    known: Mapping[str, Mapping[int, float]], finalists: Sequence[PromptCandidate], seed: PromptCandidate
) -> PromptCandidate:
    """Return the best one, unless the runner-up is better by a standard error, or nothing is better than the seed."""
    winner = finalists[0]
    for other in finalists[1:]:
        values = _differences(known[other.id], known[winner.id])
        # mean(d) > stdev(d) / sqrt(n): one standard error of the paired differences
        if other.id != seed.id and len(values) > 1 and fmean(values) > stdev(values) / math.sqrt(len(values)):
            winner = other
    gains = _differences(known[winner.id], known[seed.id])
    # A tie goes to the first prompt: it is the person's own, and mostly the shorter one.
    return winner if gains and fmean(gains) > 0 else seed


def _differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the paired differences on the tasks that both know, in order of the tasks."""
    return [ours[task] - theirs[task] for task in sorted(ours.keys() & theirs.keys())]


def _interval(value: Estimate) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
