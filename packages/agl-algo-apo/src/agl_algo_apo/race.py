"""Racing: compare candidates with a rival on growing slices of the validation set, and stop as soon as it is clear.

Every comparison is paired: the same tasks for both, and what was paid before is used again. All entrants run at once.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from agl.schemas import Record
from agl_algo_apo.candidates import PromptCandidate
from agl_algo_apo.evaluation import Evaluator, MeasureJob

CLEAR_WIN = 2.0
"""Standard errors of the mean difference above zero that end a race early."""

FINAL_WIN = 0.5
"""Standard errors above zero that win on the last slice; less is chance, and lets a text grow without end."""

CLEAR_LOSS = 1.0
"""Standard errors below zero that end one with a defeat; few, for a defeat costs only the entrant."""


class Verdict(Record, frozen=True, kw_only=True):
    """How an entrant did against its rival.

    Attributes:
        has_won: Better on all that was measured.
        difference: Mean reward difference.
        n: Tasks that were compared.
    """

    has_won: bool
    difference: float
    n: int

    @property
    def words(self) -> str:
        """The verdict in words."""
        return f"{'better' if self.has_won else 'not better'} by {self.difference:+.3f} on {self.n} validation tasks"


def slices(order: Sequence[int], first: int) -> list[tuple[int, ...]]:
    """Growing prefixes of ``order``: ``first`` tasks, then twice as many, up to all."""
    sizes: list[int] = []
    size = first
    while size < len(order):
        sizes.append(size)
        size *= 2
    return [tuple(order[:n]) for n in (*sizes, len(order))]


def difference(evaluator: Evaluator, candidate: str, rival: str, tasks: Sequence[int]) -> list[float]:
    """Reward differences on the validation tasks that are known for both."""
    ours = evaluator.scores.rewards(candidate, "val", tasks)
    theirs = evaluator.scores.rewards(rival, "val", tasks)
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
    """Run the entrants against the rival; the verdict of each by id.

    Args:
        evaluator: Pays and remembers.
        entrants: Who wants to be better.
        rival: Whom they have to beat.
        rungs: Growing sets of validation tasks.
        step: The step that asks; with ``purpose`` it makes the rollouts' ids.
        purpose: Unique within the step.
        may_tie: Whether equal is good enough, which a shorter text is.

    Raises:
        BudgetExhaustedError: The budget does not reach for the next slice; nobody is decided by that.
    """
    verdicts: dict[str, Verdict] = {}
    running = list(entrants)
    for number, tasks in enumerate(rungs):
        if not running:
            break
        jobs = [MeasureJob(candidate, "val", tasks) for candidate in (rival, *running)]
        await evaluator.measure(jobs, step=step, purpose=f"{purpose}{number}")
        is_last = number == len(rungs) - 1
        for candidate in list(running):
            values = difference(evaluator, candidate.id, rival.id, tasks)
            verdict = _verdict_on(values, is_last=is_last, may_tie=may_tie)
            if verdict is not None:
                verdicts[candidate.id] = verdict
                running.remove(candidate)
    return verdicts


def _verdict_on(values: Sequence[float], *, is_last: bool, may_tie: bool) -> Verdict | None:
    """The verdict on paired differences, ``None`` while it is open."""
    n = len(values)
    if not n:
        return Verdict(has_won=False, difference=0.0, n=0)
    mean = fmean(values)
    error = stdev(values) / math.sqrt(n) if n > 1 else math.inf
    is_equal = error == 0 and mean == 0
    if is_last or (is_equal and not may_tie):
        has_won = mean >= 0 if may_tie else mean > 0 and mean >= FINAL_WIN * error
        return Verdict(has_won=has_won, difference=mean, n=n)
    if mean < -CLEAR_LOSS * error * (1 + 1e-9):
        return Verdict(has_won=False, difference=mean, n=n)
    if mean > 0 and mean >= CLEAR_WIN * error:
        return Verdict(has_won=True, difference=mean, n=n)
    return None
