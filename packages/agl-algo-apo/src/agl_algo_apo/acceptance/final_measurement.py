"""The final measurement: the rewards that chose a winner flatter it, so fresh ones are reported.

Whoever leads after many comparisons on one set of tasks was partly lucky on it (the winner's curse), so its mean there
is biased upwards. Rollouts that no choice has looked at have no such bias: their mean is an honest estimate, and the
paired difference to the first prompt an honest gain (`estimates.py`). Their tasks are drawn at random: those of the
first slices of races have chosen the most, and texts that suit them got further.

The choice among the finalists uses all rewards, the first and the fresh ones, for more data choose better. To keep the
fresh ones nearly unbiased all the same, the runner-up replaces the best one only where it leads by a standard error.
If the winner does worse than the first prompt on the fresh rollouts, the first prompt stays.

Fresh rollouts do not show how far a text suits just these tasks. So where there are enough of them, some validation
tasks take no part in the search at all (`test`), and the report is made of those.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from agl.schemas import Record
from agl_algo_apo.measurement.estimates import Estimate, estimate, exactly_nothing
from agl_algo_apo.measurement.evaluation import Evaluator, MeasureJob
from agl_algo_apo.measurement.scores import FRESH, Split
from agl_algo_apo.search.budget import BudgetExhaustedError
from agl_algo_apo.texts.lineage import Lineage, PromptCandidate

How = Literal["test tasks", "fresh rollouts", "first measurement", "selection"]
"""The rewards that a score is made of: those on tasks that nothing was selected by; fresh ones on the others; those of
the first measurement, which flatter nothing where nothing was selected by them; or those of the selection, which
flatter what they selected."""


_SOURCES: Mapping[How, str] = {
    "test tasks": "{n} test tasks, which took no part in the search",
    "fresh rollouts": "fresh rollouts of {n} validation tasks",
    "first measurement": "the first measurement of {n} validation tasks",
    "selection": "the rollouts that selected it, which flatter it, of {n} validation tasks",
}


class FinalTasks(NamedTuple):
    """The tasks of the final measurement, by split and position, and the repeats of its rollouts."""

    split: Split
    tasks: tuple[int, ...]
    repeats: tuple[int, ...] = (FRESH,)


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
        beaten: Id of the best candidate, where the first prompt stays because it does better; else ``""``.
        beaten_score: Mean reward of that candidate, on the same tasks.
    """

    winner: str
    score: Estimate
    seed_score: Estimate
    gain: Estimate
    is_fresh: bool = True
    how: How = "fresh rollouts"
    beaten: str = ""
    beaten_score: Estimate | None = None

    @property
    def words(self) -> str:
        """The result in one line."""
        where = f"on {_SOURCES[self.how]}".format(n=self.score.n)
        if self.beaten_score is not None:
            return (
                f"the first prompt stays, with a score of {self.seed_score.words}: the best candidate has "
                f"{self.beaten_score.words}, {where}"
            )
        if self.gain == exactly_nothing(self.gain.n):
            return f"nothing better than the first prompt was found; its score is {self.seed_score.words}"
        return f"score {self.score.words} against {self.seed_score.words} of the first prompt, {where}"


async def measure_again(
    evaluator: Evaluator,
    lineage: Lineage,
    *,
    best: PromptCandidate,
    seed: PromptCandidate,
    tasks: FinalTasks,
    step: int,
) -> Result | None:
    """Run the finalists again on ``tasks``, choose among them, and return the result.

    They are the best, the runner-up and the seed; without the runner-up on test tasks, which must choose nothing. The
    choice uses all rewards on validation tasks; the report uses the fresh ones, or those on test tasks, alone. The seed
    wins a tie. Returns ``None`` where no task is known for both winner and seed, because the budget ended right after
    other resources had changed.
    """
    # By id, so that one who is several of these runs once; in this order, for the best one is to be beaten.
    is_test = tasks.split == "test"
    runner_up = [] if is_test else _runner_up(evaluator, lineage, best, seed)
    finalists = list({c.id: c for c in (best, *runner_up, seed)}.values())
    if finalists == [seed]:  # nothing to choose, and nothing is paid
        return _result(evaluator, seed, seed, how="first measurement")
    try:
        jobs = [MeasureJob(c, tasks.split, tasks.tasks, repeat) for c in finalists for repeat in tasks.repeats]
        await evaluator.measure(jobs, step=step, purpose="final")
    except BudgetExhaustedError:
        pass  # the choice stands on the rewards that were paid so far
    winner = _winner({candidate.id: _all_rewards(evaluator, candidate) for candidate in finalists}, finalists, seed)
    # Where all rewards speak for the seed, the report still says how the best candidate did.
    shown = finalists[0] if winner == seed else winner
    how: How = "test tasks" if is_test else "fresh rollouts"
    if not all(rewards_by(evaluator, candidate.id, how) for candidate in (shown, seed)):
        how = "selection"
    return _result(evaluator, shown, seed, how=how, is_beaten=winner == seed)


def _result(
    evaluator: Evaluator, winner: PromptCandidate, seed: PromptCandidate, *, how: How, is_beaten: bool = False
) -> Result | None:
    """Return the result for the chosen candidate; the seed wins where it does better."""
    rewards = {c.id: rewards_by(evaluator, c.id, how) for c in (winner, seed)}
    # Only tasks that both were measured on: scores over different tasks would not add up to the gain.
    common = sorted(rewards[winner.id].keys() & rewards[seed.id].keys())
    if not common:
        return None
    ours, theirs = ({task: rewards[c.id][task] for task in common} for c in (winner, seed))
    score, seed_score = evaluator.estimate(ours), evaluator.estimate(theirs)
    nothing, is_fresh = exactly_nothing(len(common)), how != "selection"
    if winner != seed and (is_beaten or score.mean < seed_score.mean):
        return Result(
            winner=seed.id,
            score=seed_score,
            seed_score=seed_score,
            gain=nothing,
            is_fresh=is_fresh,
            how=how,
            beaten=winner.id,
            beaten_score=score,
        )
    gain = nothing if winner == seed else estimate(_differences(ours, theirs), evaluator.range.of_differences)
    return Result(winner=winner.id, score=score, seed_score=seed_score, gain=gain, is_fresh=is_fresh, how=how)


def rewards_by(evaluator: Evaluator, candidate: str, how: How) -> Mapping[int, float]:
    """Return the rewards of a candidate that a score is made of, by task."""
    if how == "fresh rollouts":
        return evaluator.scores.fresh(candidate, "val")
    return evaluator.scores.rewards(candidate, "test" if how == "test tasks" else "val")


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
    # Where nothing is known of the two on the same tasks, other resources have changed, and the test tasks decide.
    return seed if gains and fmean(gains) <= 0 else winner


def _differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the paired differences on the tasks that both know, in order of the tasks."""
    return [ours[task] - theirs[task] for task in sorted(ours.keys() & theirs.keys())]
