"""Races candidates: a candidate that wins its race joins the pool, and the best of all is the search's best.

    contest   races proposals against their parent. Each winner becomes a parent of later proposals (status ``pool``).
              The best winner becomes the search's best, after beating it if the parent was another candidate
    race      compares candidates with a rival on growing slices of the validation set, and stops as soon as a candidate
              is decided; every verdict goes into the journal of its candidate

`static_checks.py` decides which candidates may race at all, and `proof.py` whether the best one is better than the
first prompt. Every comparison is paired: the same tasks for both, and known rewards are used again. With d_t the reward
of the entrant minus that of the rival on task t, `agl.Gate` gives the odds that the mean of d_t is above 0 (evidence)
and that it is below 0 (evidence of harm).

A race claims nothing. It decides what is worth further rollouts, so little evidence is enough. Its differences are
divided by the largest |d_t| so far, because bets gain little on small differences, and rollouts are scarce:

    evidence of harm >= 1.5 to 1         lost, at once                  (`DOUBT`); also if all d_t are 0
    evidence >= 2.5 to 1                 won, at once                   (`CLEAR`)
    evidence > 1 to 1                    won, on the last slice; otherwise lost

A text in which a change is undone need not be better, because the change has to earn its place: it wins on the last
slice, unless it has lost before.

Pairing removes the differences between tasks, which are most of the noise: some tasks are hard for both. The idea of
the race is that of Hoeffding races (Maron and Moore 1994), with slices that double as in successive halving (Jamieson
and Talwalkar 2016, arXiv 1502.07943).
"""

from __future__ import annotations

from statistics import fmean
from string import digits
from typing import TYPE_CHECKING

import msgspec

from agl.acceptance import Gate, odds_text
from agl.schemas import Record
from agl_algo_apo.measurement.evaluation import MeasureJob
from agl_algo_apo.measurement.journal import CheckReport, compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl_algo_apo.measurement.scores import Split
    from agl_algo_apo.search.tools import SearchTools
    from agl_algo_apo.texts.lineage import PromptCandidate

CLEAR = 2.5
"""Odds at which an entrant wins early; higher, because a wrong win misleads all later steps."""

DOUBT = 1.5
"""Odds of harm at which an entrant leaves; low, because a wrong defeat costs only one entrant."""

RACES: Mapping[str, str] = {
    "race": "race against the parent",
    "part": "race of the best part of a merge",
    "crown": "race against the best",
    "challenge": "second chance against the best",
    "prune": "race without one change",
}
"""The name of each race in the journal, by the race's purpose."""


class Verdict(Record, frozen=True, kw_only=True):
    """The outcome of a race for one entrant.

    Attributes:
        has_won: True if the entrant beat its rival.
        difference: Mean reward difference on the tasks that were compared.
        n: The number of tasks that were compared.
        evidence: The odds that the entrant is better.
    """

    has_won: bool
    difference: float  # mean(d_t)
    n: int
    evidence: float = 1.0

    @property
    def words(self) -> str:
        """The verdict as a phrase that the lineage shows as the reason."""
        where, odds = f"on {self.n} validation tasks", odds_text(self.evidence)
        if self.has_won:
            return f"better by {self.difference:+.3f} {where}, evidence {odds}"
        if self.difference > 0:
            return f"{self.difference:.3f} higher {where}, which may be chance: odds of {odds} are too low"
        return f"{-self.difference:.3f} lower {where}" if self.difference < 0 else f"no higher {where}"


def slices(order: Sequence[int], first: int) -> list[tuple[int, ...]]:
    """Return growing prefixes of ``order``: ``first`` tasks, then twice as many each time, and finally all of them."""
    # Prefixes, not disjoint parts: a slice repeats the tasks of the one before, whose rewards are known and free.
    sizes: list[int] = []
    size = first
    while size < len(order):
        sizes.append(size)
        size *= 2  # the error shrinks with sqrt(n), so smaller steps would look again at nearly the same
    return [tuple(order[:n]) for n in (*sizes, len(order))]


async def contest(
    search: SearchTools,
    entrants: Sequence[PromptCandidate],
    rival: PromptCandidate,
    *,
    step: int,
    purpose: str,
    may_tie: bool = False,
) -> list[PromptCandidate]:
    """Race proposals against their parent; winners join the pool and are returned, the best one first.

    With ``may_tie`` a tie is enough to win, because the entrants are texts with a part removed.
    """
    # An entrant that runs again starts beyond the slices that decided it before, because their rewards are known.
    again = [entrant for entrant in entrants if entrant.tries > 1]
    known = max((len(search.evaluator.scores.rewards(entrant.id, "val")) for entrant in again), default=0)
    rungs = [rung for rung in search.rungs if len(rung) > known] or search.rungs[-1:]
    # All at once: the entrants share the cost of the parent, and siblings see the same tasks.
    verdicts = await race(search, entrants, rival, rungs=rungs, step=step, purpose=purpose, may_tie=may_tie)
    winners: list[PromptCandidate] = []
    for entrant in entrants:
        # If the budget cuts a race, it raises instead and leaves its entrants `proposed`.
        verdict = verdicts[entrant.id]
        status = "pool" if verdict.has_won else "beaten"
        decided = search.lineage.put(entrant.replace(status=status, reason=verdict.words))
        if verdict.has_won:
            winners.append(decided)
    # By mean(d_t) of the race, the best one first; only that one may become the search's best.
    winners.sort(key=lambda winner: verdicts[winner.id].difference, reverse=True)
    # A win against a parent that is not the best proves nothing about the best.
    is_best = bool(winners)
    if winners and rival.id != search.progress.best:
        # On all slices: the two may share few tasks so far, and a difference on those alone would not be
        # representative.
        crown = await race(
            search, winners[:1], search.best, rungs=search.rungs, step=step, purpose="crown", may_tie=may_tie
        )
        is_best = crown[winners[0].id].has_won
    if is_best:
        search.progress.best = winners[0].id
    return winners


async def race(
    search: SearchTools,
    entrants: Sequence[PromptCandidate],
    rival: PromptCandidate,
    *,
    rungs: Sequence[tuple[int, ...]],
    step: int,
    purpose: str,
    may_tie: bool = False,
) -> dict[str, Verdict]:
    """Race all entrants against the rival at once; returns the verdicts by candidate id. The journal records them too.

    Args:
        search: Pays for rollouts and remembers their rewards.
        entrants: The candidates that have to beat the rival.
        rival: The candidate to beat.
        rungs: Growing sets of validation tasks.
        step: The current step; with ``purpose`` it determines the ids of the rollouts.
        purpose: A key of `RACES`, with a number if the step has several such races.
        may_tie: True if a tie is enough for an entrant to win, because the entrants are texts with a part removed.

    Raises:
        BudgetExhaustedError: The budget does not cover the next slice; undecided entrants remain undecided.
    """
    verdicts: dict[str, Verdict] = {}
    decided_on: dict[str, tuple[int, ...]] = {}
    running, scores = list(entrants), search.evaluator.scores
    search.progress.raced += [entrant.id for entrant in entrants if entrant.id not in search.progress.raced]
    for number, tasks in enumerate(rungs):
        if not running:  # all are decided: the larger slices cost nothing
            break
        # The rival runs too where its rewards are unknown; all entrants share that cost.
        jobs = [MeasureJob(candidate, "val", tasks) for candidate in (rival, *running)]
        await search.evaluator.measure(jobs, step=step, purpose=f"{purpose}-{number}")  # pays for what is not known yet
        theirs = scores.rewards(rival.id, "val", tasks)
        for candidate in list(running):
            ours = scores.rewards(candidate.id, "val", tasks)
            # If infrastructure broke a task for one of the two, the task is not compared.
            values = [ours[task] - theirs[task] for task in tasks if task in ours and task in theirs]
            verdict = _verdict_on(values, is_last=number == len(rungs) - 1, may_tie=may_tie)
            if verdict is not None:  # won or lost: it leaves the race and costs nothing more
                verdicts[candidate.id], decided_on[candidate.id] = verdict, tasks
                running.remove(candidate)
    for candidate, verdict in verdicts.items():  # after all rungs: a race that the budget cuts notes nothing
        # The journal gets both means, and the paired gain with its interval.
        report = CheckReport(name=RACES[purpose.rstrip(digits)], has_passed=verdict.has_won, step=step, rival=rival.id)
        note_check(search, candidate, report, split="val", tasks=decided_on[candidate])
    return verdicts


def _verdict_on(values: Sequence[float], *, is_last: bool, may_tie: bool) -> Verdict | None:
    """Return the verdict for an entrant's paired differences on the tasks so far; ``None`` while it is undecided."""
    largest = max(map(abs, values), default=0.0)  # max |d_t|
    gate = Gate(span=largest or 1.0)
    for value in values:
        gate.update(0.0, value)
    verdict = Verdict(has_won=False, difference=fmean(values) if values else 0.0, n=len(values), evidence=gate.evidence)
    # Equal on every task so far: more tasks rarely change that, and each costs a rollout. If a tie is enough the race
    # continues, because a tie has to hold on all tasks.
    is_lost = gate.evidence_of_harm >= DOUBT or not (largest or may_tie)
    if is_lost or not values:  # nothing was measured for both, so nothing speaks for it
        return verdict
    if is_last:
        return msgspec.structs.replace(verdict, has_won=may_tie or gate.evidence > 1)
    return msgspec.structs.replace(verdict, has_won=True) if gate.evidence >= CLEAR and not may_tie else None


def note_check(search: SearchTools, candidate: str, report: CheckReport, *, split: Split, tasks: Sequence[int]) -> None:
    """Record in the journal how a candidate was judged, with its and the rival's rewards on ``tasks`` of a split."""
    ours, theirs = (search.evaluator.scores.rewards(each, split, tasks) for each in (candidate, report.rival))
    search.journal.met(candidate, compared(report, ours, theirs, tasks=tasks, within=search.evaluator.range))
