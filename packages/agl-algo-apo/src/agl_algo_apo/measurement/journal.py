"""The journal of a search: the origin of each candidate, the checks and races that it met, and its costs.

It is part of the search's state and written with it. So a step that is repeated after a crash leaves one entry, and
`agl resources` reads the journal from the store.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from agl.schemas import Json, Record
from agl_algo_apo.measurement.estimates import Estimate, Range, estimate
from agl_algo_apo.search.budget import Spent

STATIC = "static checks"
"""The name of the checks that cost no rollout: placeholders, invariants, length, copies."""


class CheckReport(Record, frozen=True, kw_only=True):
    """The outcome of one check or race for one candidate.

    Attributes:
        name: The name of the check or race, for display.
        has_passed: True if the candidate passed.
        step: The step in which the candidate was checked.
        rival: Id of the candidate with which it was compared; ``""`` if there was none.
        score: Mean reward of the candidate on the tasks measured for both.
        rival_score: Mean reward of the rival on the same tasks.
        gain: Mean of the paired differences with its interval; its ``n`` is the number of pairs.
        reason: The reason, or the evidence.
    """

    name: str
    has_passed: bool
    step: int
    rival: str = ""
    score: float | None = None
    rival_score: float | None = None
    gain: Estimate | None = None
    reason: str = ""


class JournalEntry(Record, frozen=True, kw_only=True):
    """A candidate's origin, checks, scores and costs; its text and status are in the lineage.

    Attributes:
        evidence: Ids of the rollouts that the critic was shown.
        checks: The checks and races that the candidate met, in order.
        scores: The candidate's mean rewards by their source, such as ``selection`` and ``test tasks``.
        agent: Rollouts of the agent that were run for the candidate, with the tokens of their recorded model calls.
        optimizer: Requests to the optimiser's model that produced the candidate, with their tokens.
    """

    evidence: tuple[str, ...] = ()
    checks: tuple[CheckReport, ...] = ()
    scores: dict[str, Estimate] = {}
    agent: Spent = Spent()
    optimizer: Spent = Spent()


class Journal:
    """Collects the entries of all candidates."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __getitem__(self, candidate: str) -> JournalEntry:
        return self._entries.get(candidate, JournalEntry())

    def proposed(self, candidate: str, *, evidence: Sequence[str] = (), spent: Spent | None = None) -> None:
        """Record a proposal: the rollouts that its critic was shown, and the cost of the requests for it."""
        entry = self[candidate]
        shown = tuple(dict.fromkeys((*entry.evidence, *evidence)))
        self._change(candidate, evidence=shown, optimizer=entry.optimizer.plus(spent or Spent()))

    def paid(self, candidate: str, spent: Spent) -> None:
        """Add rollouts of the agent, or the tokens of their model calls, to a candidate's costs."""
        self._change(candidate, agent=self[candidate].agent.plus(spent))

    def met(self, candidate: str, report: CheckReport) -> None:
        """Record the outcome of a check or race for a candidate."""
        self._change(candidate, checks=(*self[candidate].checks, report))

    def scored(self, candidate: str, how: str, score: Estimate) -> None:
        """Record a candidate's score from the source ``how``; it replaces an older score from the same source."""
        self._change(candidate, scores={**self[candidate].scores, how: score})

    def dump(self) -> dict[str, Json]:
        """Return the entries by candidate, as JSON."""
        return msgspec.json.decode(msgspec.json.encode(self._entries))

    def load(self, data: Json) -> None:
        """Restore the entries from :meth:`dump`."""
        self._entries = msgspec.convert(data, dict[str, JournalEntry])

    def _change(self, candidate: str, **changes: object) -> None:
        self._entries[candidate] = msgspec.structs.replace(self[candidate], **changes)


def compared(
    report: CheckReport,
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    *,
    tasks: Sequence[int],
    within: Range,
) -> CheckReport:
    """Return the report with scores and gain, computed from rewards by task on the tasks that both have.

    Without a common task the report is unchanged.
    """
    common = [task for task in tasks if task in ours and task in theirs]
    if not common:
        return report
    return msgspec.structs.replace(
        report,
        score=fmean(ours[task] for task in common),
        rival_score=fmean(theirs[task] for task in common),
        gain=estimate([ours[task] - theirs[task] for task in common], within.of_differences),
    )
