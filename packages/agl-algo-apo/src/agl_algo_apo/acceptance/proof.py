"""The proof: `agl.Gate` decides whether the search's best candidate is better than the first prompt.

Races (`contest.py`) choose the best candidate, and claim nothing. Only a candidate that the gate calls better becomes
the search's winner, which is published, written to disk and reported. The gate gets the paired differences

    d_t = r_t - r'_t        r_t: the candidate's reward on validation task t, r'_t: that of the first prompt

in the order of the slices; a task that ran several times counts once, with its mean. After the final measurement, its
tasks count as well.

The error is spent over the run: with a probability of at least 1 - `scoring.error`, no text is published that is not
better than the first prompt. Every candidate that races has a chance to be called better by luck, so each has its
share. With j the candidate's number, in order of their first race:

    share = error_for(b) / B,  b = ceil(j / B),  B = 5           the shares add up to error for any number of candidates

Equal shares within a block of B: the first candidates are rarely good enough for a proof, so shares that fall with
every candidate would be spent before they can buy one. The order of the candidates is part of the search's progress,
so a resumed search spends nothing twice.

Why the rival is the first prompt and not the best candidate so far: on 24 tasks, a repair that gains a third of the
reward on every third task has evidence of 3 to 1, even without noise. No error worth the name can be spent on that, and
the search would stand still. Against the first prompt the gains of all repairs add up.

Limits: the choice of parents depends on validation tasks, so candidates are not quite independent of them; and a task
that runs again changes a difference that was bet on before. The final measurement uses tasks that chose nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agl.acceptance import Gate, error_for
from agl_algo_apo.acceptance.contest import note_check
from agl_algo_apo.measurement.evaluation import MeasureJob
from agl_algo_apo.measurement.journal import CheckReport

if TYPE_CHECKING:
    from agl_algo_apo.measurement.scores import Split
    from agl_algo_apo.search.tools import SearchTools
    from agl_algo_apo.texts.lineage import PromptCandidate

BLOCK = 5
"""Candidates that share their part of the error equally, B."""


def warning_of(error: float, tasks: int) -> str:
    """Return a warning if not even a text that gains the whole range of rewards could be proven better; else ``""``."""
    if error == 1:
        return ""
    gate = Gate(error=error_for(1, error=error) / BLOCK)  # the first candidate's share is the largest
    while gate.verdict != "better":
        gate.update(0, 1)
    if tasks >= gate.count:
        return ""
    return (
        f"{tasks} validation tasks are too few to prove any text better than the first one with scoring.error = "
        f"{error:g}, so the first one stays live and the best one is reported without a proof. Give at least "
        f"{gate.count} tasks (24 or more show smaller gains), or set scoring.error = 1 to publish the best one"
    )


def gate_of(search: SearchTools, candidate: PromptCandidate) -> Gate:
    """Return the gate for a candidate against the first prompt, on all tasks that both have run."""
    block, _ = divmod(search.progress.raced.index(candidate.id), BLOCK)
    share = error_for(block + 1, error=search.settings.scoring.error) / BLOCK
    scores, within = search.evaluator.scores, search.evaluator.range
    gate = Gate(error=share, span=within.high - within.low)
    splits: tuple[tuple[Split, tuple[int, ...]], ...] = (("val", search.order), ("test", search.test))
    for split, tasks in splits:  # the candidate runs on test tasks in the final measurement only
        ours, theirs = (scores.every(owner, split) for owner in (candidate.id, search.progress.seed))
        for task in [task for task in tasks if task in ours and task in theirs]:
            gate.update(theirs[task], ours[task])
    return gate


def is_proven(search: SearchTools, gate: Gate) -> bool:
    """Return true if a candidate with this gate may be the winner."""
    return gate.verdict == "better" or search.settings.scoring.error == 1  # the user asks for no proof


def judge(search: SearchTools, step: int) -> Gate:
    """Make the search's best candidate its winner if the gate calls it better on the rewards that are known."""
    best, progress = search.best, search.progress
    gate = gate_of(search, best)
    if is_proven(search, gate) and progress.winner != best.id:
        progress.winner = best.id
        report = CheckReport(
            name="proof against the first prompt", has_passed=True, step=step, rival=progress.seed, reason=gate.words
        )
        note_check(search, best.id, report, split="val", tasks=search.order)
    return gate


async def prove(search: SearchTools, step: int, *, is_last: bool = False) -> None:
    """Let the gate judge the search's best candidate, and measure it on the next slices if that promises a proof.

    Args:
        search: The search.
        step: The current step.
        is_last: True if there is no later step, so that all slices are measured if need be.

    Raises:
        BudgetExhaustedError: The budget does not cover the next slice.
    """
    progress = search.progress
    if progress.best == progress.seed:  # it became the best again, so a winner before it was lucky
        progress.winner = progress.seed
    if progress.best == progress.winner:
        return
    seed, gate = search.lineage[progress.seed], judge(search, step)
    for number, tasks in enumerate(search.rungs):
        needed = gate.needed or math.inf
        if is_proven(search, gate) or (needed > len(tasks) > gate.count and not is_last):
            return
        # The rollouts serve later races too, in which the best candidate is the rival.
        jobs = [MeasureJob(each, "val", tasks) for each in (search.best, seed)]
        await search.evaluator.measure(jobs, step=step, purpose=f"proof{number}")
        gate = judge(search, step)
