"""Accepts candidates: one that wins its race joins the pool, and the best one of all is the search's best.

    contest   races proposals against their parent; each winner becomes a parent of later proposals (status ``pool``)
    promote   makes the best winner the best candidate, which it has to beat first where the parent was another one

Races and their bounds are in `race.py`; what may enter one at all, in `static_gate.py`. Every verdict goes
into the journal of its candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_algo_apo.acceptance.race import Verdict, race
from agl_algo_apo.measurement.journal import GateReport, compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl_algo_apo.measurement.scores import Split
    from agl_algo_apo.search.tools import SearchTools
    from agl_algo_apo.texts.lineage import PromptCandidate

RACES: Mapping[str, str] = {
    "race": "race against the parent",
    "part": "race of the best part of a merge",
    "crown": "race against the best",
    "challenge": "second chance against the best",
    "prune": "race without one change",
    "doubtful": "race without one change, once more",
    "undo": "race without the most useless change",
    "delete": "race without all useless changes",
}
"""The name of the gate that a race is, by its purpose."""


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

    With ``may_tie`` it is the parent that has to be better, as it is against a text with less in it.
    """
    # An entrant that runs again starts beyond the slices that decided it before: their rewards are known.
    again = [entrant for entrant in entrants if entrant.tries > 1]
    known = max((len(search.evaluator.scores.rewards(entrant.id, "val")) for entrant in again), default=0)
    rungs = [rung for rung in search.rungs if len(rung) > known] or search.rungs[-1:]
    # All at once: the parent's part of the costs is shared, and siblings see the same tasks.
    verdicts = await noted_race(search, entrants, rival, rungs=rungs, step=step, purpose=purpose, may_tie=may_tie)
    winners: list[PromptCandidate] = []
    for entrant in entrants:
        # A race that the budget cuts raises instead, and leaves its entrants `proposed`.
        verdict = verdicts[entrant.id]
        status = "pool" if verdict.has_won else "beaten"
        decided = search.lineage.put(entrant.replace(status=status, reason=verdict.words))
        if verdict.has_won:
            winners.append(decided)
    # By mean(d_t) of the race: the best one first, which alone may become the search's best.
    winners.sort(key=lambda winner: verdicts[winner.id].difference, reverse=True)
    # Beating a parent that is not the best shows nothing about the best one.
    if winners and (rival.id == search.progress.best or await _beats_best(search, winners[0], step, may_tie=may_tie)):
        search.progress.best = winners[0].id
    return winners


async def _beats_best(search: SearchTools, winner: PromptCandidate, step: int, *, may_tie: bool) -> bool:
    """Return whether a winner whose parent was not the best candidate beats that one, too."""
    # On all slices: the two may share few tasks so far, and a difference on those alone would be of other tasks.
    verdicts = await noted_race(
        search, [winner], search.best, rungs=search.rungs, step=step, purpose="crown", may_tie=may_tie
    )
    return verdicts[winner.id].has_won


async def noted_race(
    search: SearchTools,
    entrants: Sequence[PromptCandidate],
    rival: PromptCandidate,
    *,
    rungs: Sequence[tuple[int, ...]],
    step: int,
    purpose: str,
    may_tie: bool = False,
) -> dict[str, Verdict]:
    """Race the entrants against the rival (:func:`agl_algo_apo.acceptance.race.race`) and note the verdicts."""
    verdicts = await race(search.evaluator, entrants, rival, rungs=rungs, step=step, purpose=purpose, may_tie=may_tie)
    for candidate, verdict in verdicts.items():
        # The journal has both means and the paired gain with its interval.
        report = GateReport(gate=RACES[purpose], has_passed=verdict.has_won, step=step, rival=rival.id)
        note_gate(search, candidate, report, split="val", tasks=verdict.tasks)
    return verdicts


def note_gate(search: SearchTools, candidate: str, report: GateReport, *, split: Split, tasks: Sequence[int]) -> None:
    """Note the outcome of a gate that compared a candidate with the report's rival on tasks of one split."""
    ours, theirs = (search.evaluator.scores.rewards(each, split, tasks) for each in (candidate, report.rival))
    search.journal.met(candidate, compared(report, ours, theirs, tasks=tasks, within=search.evaluator.range))
