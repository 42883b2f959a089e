"""The final measurement: the rewards that chose a winner flatter it, so fresh rewards are reported.

A candidate that leads after many comparisons on one set of tasks was partly lucky on it (the winner's curse), so its
mean there is biased upwards. Rollouts that no choice has used have no such bias: their mean is an honest estimate, and
their paired difference to the first prompt an honest gain (`estimates.py`). Their tasks are drawn at random, because
those of the first slices of races have influenced the choice most, and texts that suit them got further.

The choice among the finalists uses all rewards, the first and the fresh ones, because more data choose better. To keep
the fresh rewards nearly unbiased, the runner-up replaces the best candidate only if it leads by a standard error. If
the winner does worse than the first prompt on the fresh rollouts, the first prompt stays.

Fresh rollouts do not show how far a text suits only these tasks. So if there are enough validation tasks, some of them
take no part in the search (`test`), and the report uses those.
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
        beaten: Id of the best candidate if the first prompt stays because it does better; else ``""``.
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
        """The result as one sentence, for users."""
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
    """Run the finalists again on ``tasks``, choose the winner among them, and return the result.

    The finalists are the best candidate, the runner-up and the seed; on test tasks the runner-up is left out, because
    test tasks must choose nothing. The choice uses all rewards on validation tasks; the report uses only the fresh ones
    or those on test tasks. The seed wins a tie. Returns ``None`` if winner and seed have no measured task in common,
    because the budget ended right after other resources had changed.
    """
    # Keyed by id, so that a candidate in two of these roles runs once; the best comes first, because it is to be
    # beaten.
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
    # Even if all rewards favour the seed, the report shows the best candidate's score.
    shown = finalists[0] if winner == seed else winner
    how: How = "test tasks" if is_test else "fresh rollouts"
    if not all(rewards_by(evaluator, candidate.id, how) for candidate in (shown, seed)):
        how = "selection"
    return _result(evaluator, shown, seed, how=how, is_beaten=winner == seed)


def _result(
    evaluator: Evaluator, winner: PromptCandidate, seed: PromptCandidate, *, how: How, is_beaten: bool = False
) -> Result | None:
    """Return the result with ``winner`` as the chosen candidate, or with the seed as winner if the seed does better."""
    rewards = {c.id: rewards_by(evaluator, c.id, how) for c in (winner, seed)}
    # Only tasks measured for both: scores over different tasks would not be consistent with the gain.
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
    """Return a candidate's rewards by task, from the source that ``how`` names."""
    if how == "fresh rollouts":
        return evaluator.scores.fresh(candidate)
    return evaluator.scores.rewards(candidate, "test" if how == "test tasks" else "val")


def _runner_up(
    evaluator: Evaluator, lineage: Lineage, best: PromptCandidate, seed: PromptCandidate
) -> list[PromptCandidate]:
    others = [c for c in lineage.pool() if c.id not in (best.id, seed.id) and evaluator.scores.rewards(c.id, "val")]
    return sorted(others, key=lambda c: evaluator.mean(c.id, "val"), reverse=True)[:1]


def _all_rewards(evaluator: Evaluator, candidate: PromptCandidate) -> dict[int, float]:
    """Return a candidate's reward on each validation task; if there is a first and a fresh reward, their mean."""
    first = evaluator.scores.rewards(candidate.id, "val")
    fresh = evaluator.scores.fresh(candidate.id)
    return {t: fmean(r[t] for r in (first, fresh) if t in r) for t in sorted(first.keys() | fresh.keys())}


def _winner(
    known: Mapping[str, Mapping[int, float]], finalists: Sequence[PromptCandidate], seed: PromptCandidate
) -> PromptCandidate:
    """Return the first finalist, unless a runner-up is better by a standard error, or the seed is at least as good."""
    winner = finalists[0]
    for other in finalists[1:]:
        values = _differences(known[other.id], known[winner.id])
        # mean(d) > stdev(d) / sqrt(n): one standard error of the paired differences
        if other.id != seed.id and len(values) > 1 and fmean(values) > stdev(values) / math.sqrt(len(values)):
            winner = other
    gains = _differences(known[winner.id], known[seed.id])
    # A tie goes to the first prompt: it is the user's own, and usually the shorter one. If the two have no task in
    # common, other resources have changed, and the test tasks decide.
    return seed if gains and fmean(gains) <= 0 else winner


def _differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the paired differences on the tasks that both have, in task order."""
    return [ours[task] - theirs[task] for task in sorted(ours.keys() & theirs.keys())]
