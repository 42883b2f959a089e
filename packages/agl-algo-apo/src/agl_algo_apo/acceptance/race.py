"""Races: candidates against a rival on growing slices of the validation set, stopped as soon as one is decided.

Every comparison is paired: the same tasks for both, and rewards that were paid before are used again. With d_t the
reward of the entrant minus that of the rival on task t, over the n tasks of the slices so far:

    mean  = sum(d_t) / n
    error = stdev(d_t) / sqrt(n)            the standard error of the mean; stdev divides by n - 1

    mean >= 2 * error and mean > 0          won, at once              (`CLEAR_WIN`)
    mean < -1 * error                       lost, at once             (`CLEAR_LOSS`)
    mean >= 0.5 * error and mean > 0        won, on the last slice    (`FINAL_WIN`); otherwise lost

A text with a change undone has to win nothing: the change has to earn its place. It loses to the text with the change

    mean < -2 * error                       at once                   (`CLEAR_WIN`, of the change)
    mean < -1 * error                       on the last slice         (`CLEAR_LOSS`); otherwise it wins

Pairing removes what tasks differ in, which is most of the noise: some tasks are hard for both. The idea is that of
Hoeffding races (Maron and Moore 1994), with slices that double as in successive halving (Jamieson and Talwalkar 2016,
arXiv 1502.07943).

Deviation: the bounds are plain standard errors and not corrected for looking several times. They decide what is worth
further rollouts; how good the winner is, fresh rollouts tell (`acceptance/final_measurement.py`).
All entrants of a race run at once.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from agl.schemas import Record
from agl_algo_apo.measurement.evaluation import Evaluator, MeasureJob
from agl_algo_apo.texts.lineage import PromptCandidate

CLEAR_WIN = 2.0
"""Standard errors above zero at which an entrant wins early; many, for a wrong win misleads all later steps."""

FINAL_WIN = 0.5
"""Standard errors above zero that win on the last slice; less is chance, and would let a text grow without end."""

CLEAR_LOSS = 1.0
"""Standard errors below zero at which an entrant loses early; few, for a wrong defeat costs that entrant alone."""


class Verdict(Record, frozen=True, kw_only=True):
    """The outcome of a race for one entrant.

    Attributes:
        has_won: Whether it beat its rival.
        difference: Mean reward difference on the tasks that were compared.
        n: Number of these tasks.
        tasks: The validation tasks of the slice that decided.
    """

    has_won: bool
    difference: float
    n: int
    tasks: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The verdict as a phrase, for the lineage."""
        return f"{'better' if self.has_won else 'not better'} by {self.difference:+.3f} on {self.n} validation tasks"


def slices(order: Sequence[int], first: int) -> list[tuple[int, ...]]:
    """Return growing prefixes of ``order``: ``first`` tasks, then twice as many each time, and all of them last."""
    # Prefixes, and not parts: a slice repeats the tasks of the one before, whose rewards are known and cost nothing.
    sizes: list[int] = []
    size = first
    while size < len(order):
        sizes.append(size)
        size *= 2  # the error shrinks with sqrt(n), so smaller steps would look again at nearly the same
    return [tuple(order[:n]) for n in (*sizes, len(order))]


def difference(evaluator: Evaluator, candidate: str, rival: str, tasks: Sequence[int]) -> list[float]:
    """Return the reward differences on the validation tasks that are known for both."""
    ours = evaluator.scores.rewards(candidate, "val", tasks)
    theirs = evaluator.scores.rewards(rival, "val", tasks)
    # A task that infrastructure broke for one of the two is compared for neither.
    return [ours[task] - theirs[task] for task in tasks if task in ours and task in theirs]


async def race(
    evaluator: Evaluator,
    entrants: Sequence[PromptCandidate],
    rival: PromptCandidate,
    *,
    rungs: Sequence[tuple[int, ...]],
    step: int,
    purpose: str,
    may_tie: bool = False,
) -> dict[str, Verdict]:
    """Race the entrants against the rival and return the verdict on each, by candidate id.

    Args:
        evaluator: Pays for rollouts and remembers their rewards.
        entrants: The candidates that have to beat the rival.
        rival: The candidate to beat.
        rungs: Growing sets of validation tasks.
        step: The step that asks; with ``purpose`` it makes the rollouts' ids.
        purpose: Unique within the step.
        may_tie: Whether it is the rival that has to be better, as it is against a text with less in it.

    Raises:
        BudgetExhaustedError: The budget does not reach for the next slice; entrants that are undecided stay so.
    """
    verdicts: dict[str, Verdict] = {}
    running = list(entrants)
    for number, tasks in enumerate(rungs):
        if not running:
            break
        # The rival runs too, as far as its rewards are not known; its part of the costs is shared by all entrants.
        jobs = [MeasureJob(candidate, "val", tasks) for candidate in (rival, *running)]
        await evaluator.measure(jobs, step=step, purpose=f"{purpose}{number}")  # pays for what is not known yet
        is_last = number == len(rungs) - 1
        for candidate in list(running):
            values = difference(evaluator, candidate.id, rival.id, tasks)
            verdict = _verdict_on(values, is_last=is_last, may_tie=may_tie)
            if verdict is not None:  # won or lost: it leaves the race and costs nothing more
                verdicts[candidate.id] = msgspec.structs.replace(verdict, tasks=tasks)
                running.remove(candidate)
    return verdicts


def _verdict_on(values: Sequence[float], *, is_last: bool, may_tie: bool) -> Verdict | None:
    """Return the verdict on paired differences, or ``None`` while it is open."""
    n = len(values)
    if not n:
        return Verdict(has_won=False, difference=0.0, n=0)  # nothing was measured for both, so nothing speaks for it
    mean = fmean(values)  # of d_t, in rewards
    error = stdev(values) / math.sqrt(n) if n > 1 else math.inf  # s / sqrt(n); one task decides nothing early
    # Equal on every task so far: more tasks rarely change that, and each costs a rollout. Where a tie is enough the
    # race goes on, for a tie has to hold on all tasks.
    is_equal = error == 0 and mean == 0
    if is_last or (is_equal and not may_tie):
        has_won = mean >= -CLEAR_LOSS * error * (1 + 1e-9) if may_tie else mean > 0 and mean >= FINAL_WIN * error
        return Verdict(has_won=has_won, difference=mean, n=n)
    # One lost task among n ties has mean = -1/n and error = 1/n: exactly one standard error, which is still open. The
    # factor keeps rounding from deciding it.
    if mean < -(CLEAR_WIN if may_tie else CLEAR_LOSS) * error * (1 + 1e-9):
        return Verdict(has_won=False, difference=mean, n=n)
    # Where all differences are the same the error is 0, and any gain is clear; mean > 0 excludes a tie.
    if mean > 0 and mean >= CLEAR_WIN * error:
        return Verdict(has_won=True, difference=mean, n=n)
    return None  # between one error below and two above: the next slice has to tell
